"""Restoring a module from a checkpoint only where it is owned.

Lightning restores before it sets a strategy up, when no rank knows its part yet. What it gives is kept, with tensors
that are mapped from the file, until the module is placed; then each rank copies its own part and touches nothing else
of the file. A module built on the meta device has no memory before that either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule

from d9d_lightning.runtime.materialize import needs_materializing
from d9d_lightning.strategy.checkpoint import check_names, load_module
from d9d_lightning.strategy.placement import known_placement

__all__ = ["PendingState", "load_pending", "restore_module"]


@dataclass(frozen=True)
class PendingState:
    """A state dict that waits for its module to be placed.

    Attributes:
        state: Under the names of the whole module.
        strict: Whether names must match.
    """

    state: Mapping[str, Any]
    strict: bool


def restore_module(
    module: LightningModule, state: Mapping[str, Any], strict: bool, *, is_split: bool
) -> PendingState | None:
    """Load a state dict, or give back what has to wait.

    Args:
        module: The user's module.
        state: Under the names of the whole module.
        strict: Whether names must match.
        is_split: Whether several ranks share the module.

    Raises:
        RuntimeError: Names or shapes do not match.
    """
    if known_placement(module) is None and (is_split or needs_materializing(module)):
        check_names(module, state, strict)
        return PendingState(state, strict)
    load_pending(module, PendingState(state, strict))
    return None


def load_pending(module: LightningModule, pending: PendingState) -> None:
    """Load this rank's part, now that it is known."""
    placed = known_placement(module)
    ownership = placed.ownership if placed is not None and placed.size > 1 else None
    load_module(module, pending.state, ownership, pending.strict)
