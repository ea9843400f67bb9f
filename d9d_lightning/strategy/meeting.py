"""Makes sure that every rank takes part in something collective, before anybody waits for a rank that will not."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from d9d_lightning.errors import PipelineError

__all__ = ["Meeting", "MissingRanksError"]

WAIT_SECONDS = 60.0
POLL_SECONDS = 0.005


class MissingRanksError(PipelineError, RuntimeError):
    """Something that all ranks must call was called on some of them."""


class Meeting:
    """Counts arrivals in the store of the process group; blocks no collective.

    Args:
        world_size: Number of processes.
        name: Where it counts; different for every object of a run, equal on all ranks.
    """

    def __init__(self, world_size: int, name: str) -> None:
        self._world_size = world_size
        self._name = name
        self._number = 0

    def attend(self, what: str, seconds: float | None = None) -> None:
        """Wait until every rank is here.

        Args:
            what: What is about to be done; shown in the error.
            seconds: How long to wait.

        Raises:
            MissingRanksError: Not all ranks came.
        """
        if self._world_size == 1:
            return
        store: Any = dist.distributed_c10d._get_default_store()
        self._number += 1
        key = f"d9d_meeting/{self._name}/{self._number}"
        arrived = store.add(key, 1)
        until = time.monotonic() + (WAIT_SECONDS if seconds is None else seconds)
        while arrived < self._world_size:
            if time.monotonic() > until:
                raise MissingRanksError(
                    f"{what} was called on {arrived} of {self._world_size} ranks only. Every rank has a part of the "
                    "module, so all of them must call it: take away the `if trainer.is_global_zero:` around it."
                )
            time.sleep(POLL_SECONDS)
            arrived = store.add(key, 0)
