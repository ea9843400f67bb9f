"""Modules that were placed on a pipeline: placed once, used by every later run, whichever trainer runs it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from lightning.pytorch import LightningModule
from torch import nn

from d9d_lightning.errors import PipelineConfigurationError
from d9d_lightning.runtime.pipeline import Pipeline
from d9d_lightning.strategy.engine import Engine
from d9d_lightning.strategy.whole import Ownership
from d9d_lightning.values import Placement

__all__ = ["PlacedModule", "find_placed", "known_placement", "read_ownership", "remember_placed"]

_PLACED: weakref.WeakKeyDictionary[nn.Module, PlacedModule] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class PlacedModule:
    """What is known of a module once its parameters have their ranks.

    Attributes:
        engine: The pipeline that runs it.
        placement: Stage of every unit.
        ownership: Who has which tensor.
        names: Keys of the whole ``state_dict``, in order.
        size: Number of pipeline ranks.
        stage_to_rank: The placement of stages.
    """

    engine: Pipeline
    placement: Placement
    ownership: Ownership
    names: tuple[str, ...]
    size: int
    stage_to_rank: tuple[int, ...]


def find_placed(module: LightningModule, size: int, stage_to_rank: Sequence[int]) -> PlacedModule | None:
    """The placement that a module already has.

    Raises:
        PipelineConfigurationError: It was made for another pipeline; a rank cannot get back what it gave away.
    """
    placed = _PLACED.get(module)
    if placed is None or (placed.size == 1 and size == 1):
        return placed if placed is not None and placed.stage_to_rank == tuple(stage_to_rank) else None
    if (placed.size, placed.stage_to_rank) != (size, tuple(stage_to_rank)):
        raise PipelineConfigurationError(
            f"this {type(module).__name__} was placed on {placed.size} pipeline ranks as stages "
            f"{list(placed.stage_to_rank)}; the new strategy asks for {size} ranks and {list(stage_to_rank)}. Use the "
            "same schedule and number of devices, or build a new module and load the checkpoint."
        )
    return placed


def known_placement(module: nn.Module) -> PlacedModule | None:
    """The placement of a module, whatever pipeline it was made for."""
    return _PLACED.get(module)


def remember_placed(module: LightningModule, placed: PlacedModule) -> None:
    """Keep a placement for as long as the module lives."""
    _PLACED[module] = placed


def read_ownership(engine: Engine, rank: int) -> Ownership:
    """Who has which tensor, from what the engine says."""
    owners: dict[str, int] = {name: ranks[0] for name, ranks in engine.parameter_owners.items()}
    owners.update(engine.buffer_owners)
    held = {name for name, ranks in engine.parameter_owners.items() if rank in ranks}
    held |= {name for name, owner in engine.buffer_owners.items() if owner == rank}
    return Ownership(rank, owners, frozenset(held))
