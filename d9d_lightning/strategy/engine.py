"""The one place where the strategy meets the runtime: what it asks of a pipeline, and how it makes one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from d9d_lightning.runtime.batch import find_batch_size
from d9d_lightning.runtime.batch import split_batch as cut_batch
from d9d_lightning.runtime.pretrained import PretrainedWeights
from d9d_lightning.schedule import Program
from d9d_lightning.strategy.loggers import OUTLET
from d9d_lightning.strategy.metrics import metric_objects
from d9d_lightning.values import Microbatch, Placement

__all__ = ["BatchPosition", "Engine", "Sink", "find_sinks", "split_batch"]

Sink = tuple[object, str]


class Engine(Protocol):
    """What the strategy asks of ``d9d_lightning.runtime.pipeline.Pipeline``."""

    @property
    def owned_parameters(self) -> Mapping[str, nn.Parameter]:
        """This rank's parameters, shared ones included."""

    @property
    def parameter_owners(self) -> Mapping[str, tuple[int, ...]]:
        """Pipeline ranks that hold each parameter; the first one saves and counts it."""

    @property
    def parameter_stages(self) -> Mapping[str, tuple[int, ...]]:
        """Stages that use each parameter."""

    @property
    def buffer_owners(self) -> Mapping[str, int]:
        """Pipeline rank that updates each buffer."""

    def place(self, step: Callable[[Microbatch], Any], microbatches: Sequence[Microbatch]) -> Placement:
        """Decide which stage every unit lives on."""

    def release(self, seed: int = 0, given: Collection[str] = (), pretrained: PretrainedWeights | None = None) -> None:
        """Replace what other ranks own by placeholders."""

    def run(
        self,
        step: Callable[[Microbatch], Any],
        microbatches: Sequence[Microbatch],
        program: Program,
        *,
        finish: Callable[[Microbatch, Any], Tensor | None],
        observer: Any = None,
        restart: Callable[[], None] | None = None,
        training: bool = True,
        kind: str = "training_step",
    ) -> Any:
        """Run one batch."""

    def is_common(self, error: BaseException) -> bool:
        """Whether an error of :meth:`run` was raised on all ranks for the same reason."""


def find_sinks(module: nn.Module) -> tuple[Sink, ...]:
    """Methods that the user's step hands values to, and that only the loss owner may really call."""
    sinks: list[Sink] = [(module, "log"), (module, "log_dict"), (OUTLET, "write")]
    for metric in metric_objects(module):
        sinks += [(metric, "forward"), (metric, "update")]
    return tuple(sinks)


@dataclass(frozen=True)
class BatchPosition:
    """Where a batch stands, for the random-number rule; equal on every rank of a pipeline.

    Attributes:
        seed: The seed of the run.
        replica: Data-parallel rank.
        loop: 0 training, 1 validation, 2 test, 3 predict.
        dataloader: Index of the dataloader.
        batch: Batches that this loop has seen before.
    """

    seed: int
    replica: int
    loop: int
    dataloader: int
    batch: int

    @property
    def numbers(self) -> tuple[int, ...]:
        """What a microbatch carries."""
        return (self.seed, self.replica, self.loop, self.dataloader, self.batch)


def split_batch(
    args: tuple[Any, ...],
    num_microbatches: Callable[[int], int],
    *,
    spec: Any = None,
    position: BatchPosition | None = None,
) -> list[Microbatch]:
    """Microbatches of the step's arguments, of which the first is the batch.

    Args:
        args: Positional arguments of the step.
        num_microbatches: From the number of samples of a batch to its number of microbatches.
        spec: ``D9DStrategy(batch_spec=...)``.
        position: Where the batch stands.
    """
    size, _ = find_batch_size(args[0], spec)
    split = cut_batch(args[0], num_microbatches(size or 1), spec)
    seed = position.numbers if position is not None else ()
    pieces = zip(split.microbatches, split.sizes, strict=True)
    return [
        Microbatch(index=index, size=size, args=(piece, *args[1:]), seed=(*seed, index))
        for index, (piece, size) in enumerate(pieces)
    ]
