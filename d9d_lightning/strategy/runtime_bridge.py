"""Makes the runtime's pipeline from what the strategy knows."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule

from d9d_lightning.strategy.engine import Engine, Sink
from d9d_lightning.strategy.options import StrategyOptions
from d9d_lightning.strategy.programs import Programs
from d9d_lightning.strategy.world import World

__all__ = ["make_engine"]


def make_engine(
    module: LightningModule,
    *,
    world: World,
    programs: Programs,
    rank: int,
    options: StrategyOptions,
    sinks: Sequence[Sink],
    seed: int,
) -> Engine:
    """Pipeline of this rank, not yet placed."""
    runtime: Any = importlib.import_module("d9d_lightning.runtime.pipeline")
    engine: Engine = runtime.Pipeline(
        module,
        stage_to_rank=programs.stage_to_rank,
        rank=rank,
        size=programs.size,
        groups=None,
        units=options.units,
        split_points=options.split_points,
        sinks=sinks,
        seed=seed,
    )
    return engine
