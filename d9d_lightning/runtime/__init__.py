"""Running one rank's program: executor, transport, whole-batch state, failure watch, profiler.

Reading order: ``executor`` -> ``transport`` -> ``communication`` -> ``pipeline``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from d9d_lightning.runtime.communication import StageCommunicationHandler
    from d9d_lightning.runtime.pipeline import Pipeline, StepOutcome
    from d9d_lightning.runtime.profiler import Profiler
    from d9d_lightning.runtime.sharding import (
        ShardingSpecLeaf,
        SpecReplicate,
        SpecShard,
        shard_tree,
        unshard_tree,
    )
    from d9d_lightning.runtime.state import PipelineState, PipelineStateHandler

__all__ = [
    "Pipeline",
    "PipelineState",
    "PipelineStateHandler",
    "Profiler",
    "ShardingSpecLeaf",
    "SpecReplicate",
    "SpecShard",
    "StageCommunicationHandler",
    "StepOutcome",
    "shard_tree",
    "unshard_tree",
]

# One line per public name: the file that defines it.
_LAZY = {
    "Pipeline": "pipeline",
    "PipelineState": "state",
    "PipelineStateHandler": "state",
    "Profiler": "profiler",
    "ShardingSpecLeaf": "sharding",
    "SpecReplicate": "sharding",
    "SpecShard": "sharding",
    "StageCommunicationHandler": "communication",
    "StepOutcome": "pipeline",
    "shard_tree": "sharding",
    "unshard_tree": "sharding",
}


def __getattr__(name: str) -> Any:
    # A profiler or a sharding specification must not pay for loading the whole runtime.
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(sorted(__all__))}")
