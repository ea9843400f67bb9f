"""One stage, one microbatch: the replay of the user's step, split backward, and what crosses its borders.

Reading order: ``script`` -> ``replay`` -> ``stage``; ``split_backward`` and ``world`` as they are met.
"""

from __future__ import annotations

from d9d_lightning.stage.descriptors import (
    EndStageOutput,
    ReceiveStageInput,
    SendStageOutput,
    StageInput,
    StageOutput,
    StartStageInput,
)
from d9d_lightning.stage.planner import Planner
from d9d_lightning.stage.stage import PipelineStage

__all__ = [
    "EndStageOutput",
    "PipelineStage",
    "Planner",
    "ReceiveStageInput",
    "SendStageOutput",
    "StageInput",
    "StageOutput",
    "StartStageInput",
]
