"""Replicas must log the same keys: a reduction that only some of them join never ends, or mixes values up."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from d9d_lightning.errors import PipelineError
from d9d_lightning.runtime.groups import maximum_over
from d9d_lightning.values import LogRecord

__all__ = ["DifferentKeysError", "KeyAgreement"]


class DifferentKeysError(PipelineError, ValueError):
    """``self.log`` was called with a key on some replicas only."""


class KeyAgreement:
    """Compares what replicas logged, with one small message, before anything is reduced.

    Args:
        group: A gloo group of all processes; None where there is one replica, and nothing to compare.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group

    def check(self, records: Sequence[LogRecord]) -> None:
        """Compare; collective over the group.

        Raises:
            DifferentKeysError: Names the keys that are not everywhere.
        """
        if self._group is None:
            return
        names = sorted({f"{record.hook}.{record.name}" for record in records})
        digest = hashlib.blake2b("\n".join(names).encode(), digest_size=7).digest()
        number = int.from_bytes(digest, "little")
        largest, negated_smallest = maximum_over([number, -number], self._group)
        if largest == -negated_smallest:
            return
        found: list[list[str]] = [[] for _ in range(dist.get_world_size(self._group))]
        dist.all_gather_object(found, names, group=self._group)
        everywhere = set(found[0]).intersection(*found)
        partial = {name: [rank for rank, own in enumerate(found) if name in own] for own in found for name in own}
        listed = "; ".join(
            f"{name.partition('.')[2]!r} (in {name.partition('.')[0]}) on ranks {ranks}"
            for name, ranks in sorted(partial.items())
            if name not in everywhere
        )
        raise DifferentKeysError(
            f"self.log was called with keys that are not on every replica: {listed}. Log every key on every replica, "
            "for example with a value of 0 or NaN where there is nothing to log."
        )
