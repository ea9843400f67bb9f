"""Combines what the microbatches of one batch logged into what one device would have logged for the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from d9d_lightning.values import LogRecord

__all__ = ["MetricReading", "combine_records", "returned_losses"]


@dataclass(frozen=True)
class MetricReading:
    """A torchmetrics object that was logged: where it lives on the module, and what its last ``forward`` returned."""

    attribute: str
    forward_value: Any


def combine_records(records: Sequence[LogRecord], losses: Sequence[Tensor] = ()) -> list[LogRecord]:
    """One record per key, in the order in which keys were first logged.

    Means are weighted by size, so that uneven microbatches give the mean of the batch; sums add up; minima and maxima
    stay what they are. A torchmetrics object keeps its exact state elsewhere; its step value becomes the weighted mean
    of its ``forward`` values.

    Args:
        records: What was logged, microbatch after microbatch.
        losses: Loss of every microbatch, where there is one. A key that holds just them is a mean of samples, whatever
            its ``reduce_fx`` does with batches; a sum of whole numbers is a count all the same.
    """
    by_key: dict[tuple[str, str], list[LogRecord]] = {}
    for record in records:
        by_key.setdefault((record.hook, record.name), []).append(record)
    return [_combine(same, losses) for same in by_key.values()]


def returned_losses(outputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """Losses that a step of evaluation returned, as a number or under ``"loss"``; empty where some microbatch has none.

    Args:
        outputs: What the step returned, microbatch after microbatch.
    """
    found = [output.get("loss") if isinstance(output, Mapping) else output for output in outputs]
    losses = tuple(loss for loss in found if isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point())
    return losses if len(losses) == len(outputs) else ()


def _combine(same: Sequence[LogRecord], losses: Sequence[Tensor]) -> LogRecord:
    last = same[-1]
    if len(same) == 1:
        return last
    total = sum(record.size for record in same)
    if isinstance(last.value, MetricReading):
        readings = [record.value.forward_value for record in same]
        mean = _mean_of_trees(readings, [float(record.size) for record in same])
        return replace(last, value=MetricReading(last.value.attribute, mean), size=total)
    values = torch.stack([_as_float(record.value) for record in same])
    reduction = _reduction_name(last.options.get("reduce_fx", "mean"))
    if reduction in ("sum", "max", "min") and (not _are(losses, same) or (reduction == "sum" and _are_whole(values))):
        value = getattr(values, reduction)()
    else:
        value = _weighted_mean(values, _weights(same))
    return replace(last, value=value, size=total, options=_whole_batch_options(same))


def _are(losses: Sequence[Tensor], same: Sequence[LogRecord]) -> bool:
    return len(losses) == len(same) and all(
        bool(loss == record.value) for loss, record in zip(losses, same, strict=True)
    )


def _are_whole(values: Tensor) -> bool:
    return bool((values == values.round()).all())


def _reduction_name(reduce_fx: Any) -> str:
    return str(getattr(reduce_fx, "__name__", reduce_fx)).lower()


def _as_float(value: Tensor) -> Tensor:
    # the result collection stores float32 or float64 only; converting first keeps low precision out of the mean
    return value if value.dtype in (torch.float32, torch.float64) else value.to(torch.get_default_dtype())


def _batch_sizes(same: Sequence[LogRecord]) -> list[int] | None:
    sizes = [record.options.get("batch_size") for record in same]
    return None if any(size is None for size in sizes) else [int(size) for size in sizes if size is not None]


def _is_constant_one(sizes: Sequence[int], same: Sequence[LogRecord]) -> bool:
    """Whether the user wrote ``batch_size=1`` as a constant, and not the size of what was running."""
    return all(size == 1 for size in sizes) and any(record.size != 1 for record in same)


def _weights(same: Sequence[LogRecord]) -> list[float]:
    sizes = _batch_sizes(same)
    if sizes is None or _is_constant_one(sizes, same) or sum(sizes) == 0:
        return [float(record.size) for record in same]
    return [float(size) for size in sizes]


def _whole_batch_options(same: Sequence[LogRecord]) -> dict[str, Any]:
    options = dict(same[-1].options)
    sizes = _batch_sizes(same)
    if sizes is not None and not _is_constant_one(sizes, same):
        options["batch_size"] = sum(sizes)
    return options


def _weighted_mean(values: Tensor, weights: Sequence[float]) -> Tensor:
    share = torch.tensor(weights, dtype=values.dtype, device=values.device)
    return (values * share).sum() / share.sum()


def _mean_of_trees(trees: Sequence[Any], weights: Sequence[float]) -> Any:
    def mean(*leaves: Any) -> Any:
        if all(isinstance(leaf, Tensor) and leaf.shape == leaves[0].shape for leaf in leaves):
            stacked = torch.stack([_as_float(leaf) for leaf in leaves])
            share = torch.tensor(weights, dtype=stacked.dtype, device=stacked.device)
            return (stacked * share.reshape(-1, *[1] * (stacked.dim() - 1))).sum(0) / share.sum()
        return leaves[-1]

    if any(tree is None for tree in trees):
        return trees[-1]
    return tree_map(mean, trees[0], *trees[1:])
