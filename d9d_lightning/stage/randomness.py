"""Random numbers as a function of position.

The state is set at the entry of the step, and after each unit call that drew in the trace: from where the microbatch
stands, the unit's name and the number of the call. So a stage that skips a unit goes on with the same numbers as the
stage that ran it, and a recomputation (activation checkpointing) finds the state that the first run started from.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable

import torch

from d9d_lightning.partition.generators import numpy_random

__all__ = ["set_position"]


def set_position(kinds: Iterable[str], seed: tuple[int, ...], unit: str = "", number: int = 0) -> None:
    """Set the global generators of the given kinds to the state of one position of the step.

    Args:
        kinds: ``"torch"``, ``"python"``, ``"numpy"``; others are left alone.
        seed: Where the microbatch stands in the run.
        unit: The unit that was just called; empty at the entry of the step.
        number: How often the unit was called before in this step.
    """
    digest = hashlib.blake2b(f"{seed}/{unit}/{number}".encode(), digest_size=8).digest()
    state = int.from_bytes(digest, "little") >> 1
    for kind in kinds:
        if kind == "torch":
            torch.default_generator.manual_seed(state)
            if torch.cuda.is_initialized():
                torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(state)
        elif kind == "python":
            random.seed(state)
        else:
            numpy_random().seed(state % 2**32)
