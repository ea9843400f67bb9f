"""torchmetrics objects: only the loss owner updates them, every rank must be able to compute them.

Updates stay local to the loss owner during an epoch. When the epoch ends, and before any hook of it runs, the states
go to the other ranks of the pipeline; computing then means the same everywhere. Over replicas torchmetrics reduces as
always, in the group of data-parallel replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.distributed import gather_all_tensors

from d9d_lightning.strategy.messages import Messenger

__all__ = ["MetricStates", "bind_metrics", "metric_objects", "module_metrics"]


def module_metrics(module: nn.Module) -> dict[str, Metric]:
    """Every torchmetrics object below a module, by qualified name."""
    return {name: child for name, child in module.named_modules() if isinstance(child, Metric)}


def metric_objects(module: nn.Module) -> list[Metric | MetricCollection]:
    """Metrics and collections: collections decide by the values of their members which of them share a state."""
    return [child for child in module.modules() if isinstance(child, (Metric, MetricCollection))]


class _ReplicaGather:
    """Gathers over replicas. Copies refer to the same groups, and a pickled one gathers over the world again."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group

    def __call__(self, value: Tensor, group: Any = None) -> list[Tensor]:
        return [value] if self._group is None else gather_all_tensors(value, group=self._group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ReplicaGather:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (_world_gather, ())


class _HasReplicas:
    """Whether there is anything to reduce over; a metric asks before it communicates."""

    def __init__(self, answer: bool) -> None:
        self._answer = answer

    def __call__(self) -> bool:
        return self._answer


def _world_gather() -> Callable[..., list[Tensor]]:
    return gather_all_tensors


def bind_metrics(module: nn.Module, replicas: ProcessGroup | None) -> None:
    """Make every metric reduce over replicas of this rank only, never over the ranks of a pipeline.

    Args:
        module: The user's module.
        replicas: Group of replicas, or None where there is one.
    """
    for metric in module_metrics(module).values():
        # the attribute `process_group` would break deepcopy of the module; a callable with its own copy rule does not
        metric.dist_sync_fn = _ReplicaGather(replicas)
        metric.distributed_available_fn = _HasReplicas(replicas is not None)


class MetricStates:
    """Sends metric states from the loss owner to the other ranks, once per epoch and only where they changed."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._sent: dict[str, _Version] = {}

    def share(self, messenger: Messenger) -> None:
        """Give every rank the owner's states; collective over the pipeline."""
        metrics = module_metrics(self._module)
        if not metrics:
            return
        received = messenger.share(lambda: self._changed(metrics))
        if messenger.is_source:
            return
        for name, (count, forward_value, states) in received.items():
            metric = metrics[name]
            for attribute, value in states.items():
                setattr(metric, attribute, value)
            metric._update_count = count
            metric._forward_cache = forward_value
            metric._computed = None

    def _changed(self, metrics: dict[str, Metric]) -> dict[str, tuple[int, Any, dict[str, Any]]]:
        changed = {}
        for name, metric in metrics.items():
            states = {attribute: getattr(metric, attribute) for attribute in metric._defaults}
            now = _Version.of(metric._update_count, states)
            if now != self._sent.get(name):
                changed[name] = (metric._update_count, metric._forward_cache, states)
                self._sent[name] = now
        return changed


@dataclass(frozen=True)
class _Version:
    """Tells whether states are still those that were sent, without a look at their values.

    The count alone does not: after a reset and as many updates as before it is the same.
    """

    count: int
    marks: tuple[tuple[int, int], ...]
    # kept alive, so that no other tensor gets the same id
    tensors: tuple[Tensor, ...] = field(compare=False)

    @classmethod
    def of(cls, count: int, states: dict[str, Any]) -> _Version:
        """Version of the states of one metric."""
        tensors: list[Tensor] = []
        for value in states.values():
            tensors += value if isinstance(value, list) else [value]
        return cls(count, tuple((id(tensor), tensor._version) for tensor in tensors), tuple(tensors))
