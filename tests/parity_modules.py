"""Every module of the parity grid, its batches, and what it must equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.parity import StepModule
from tests.parity_basics import (
    Mlp,
    images,
    pairs,
    tokens,
    translation,
)
from tests.parity_networks import (
    BatchNormNet,
    Checkpointed,
    CheckpointedReentrant,
    CheckpointedRegion,
    Contrastive,
    EncoderDecoder,
    FrozenFront,
    Gpt,
    LowRank,
    NoGradBranch,
    SharedHeadGpt,
    Siamese,
    ThreeTimes,
    UNet,
)
from tests.parity_unusual import (
    DirectForward,
    Forces,
    HalfwayPenalty,
    ManyValues,
    RawParameters,
    ReversibleNet,
    Structures,
    WeightSlope,
)

WHOLE = "one device, the whole batch"
SAME_MICROBATCHES = "one device that accumulates the same microbatches"
SIZE_ONE = "a pipeline of one rank, the same microbatches"


@dataclass(frozen=True)
class Case:
    """A module, its batches, and what it must equal.

    Attributes:
        make: Builds the module.
        batch: The batch of a number.
        reference: What it must equal.
        key_bias: How the names of attention's key biases end, and which part of them is that of the keys. Softmax does
            not see it, so its gradient is rounding noise, of which AdamW makes whole steps.
    """

    make: Callable[[], StepModule]
    batch: Callable[..., Any]
    reference: str = WHOLE
    key_bias: tuple[str, slice] | None = None

    @property
    def name(self) -> str:
        return self.make.__name__


CASES: dict[str, Case] = {
    case.name: case
    for case in [
        Case(Mlp, pairs),
        Case(Gpt, tokens),
        Case(SharedHeadGpt, tokens),
        Case(UNet, images, SIZE_ONE),
        Case(EncoderDecoder, translation),
        Case(Siamese, pairs),
        Case(BatchNormNet, images, SAME_MICROBATCHES),
        Case(FrozenFront, pairs),
        Case(LowRank, pairs),
        Case(ThreeTimes, pairs),
        Case(Checkpointed, pairs),
        Case(CheckpointedReentrant, pairs),
        Case(CheckpointedRegion, pairs),
        Case(NoGradBranch, pairs),
        Case(ManyValues, pairs),
        Case(RawParameters, pairs),
        Case(Structures, pairs),
        Case(DirectForward, pairs),
        Case(Contrastive, pairs, SAME_MICROBATCHES),
        Case(Forces, pairs, SAME_MICROBATCHES),
        Case(HalfwayPenalty, pairs, SAME_MICROBATCHES),
        Case(WeightSlope, pairs, SAME_MICROBATCHES),
        Case(ReversibleNet, pairs),
    ]
}
