"""Splitting a batch into microbatches.

What is cut and what every microbatch gets whole is decided by :mod:`d9d_lightning.runtime.batch_reading`; the rules
are written for users in ``docs/batches.md``. :func:`merge_outputs` is the way back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from d9d_lightning.errors import PipelineConfigurationError
from d9d_lightning.runtime.batch_reader import Form
from d9d_lightning.runtime.batch_reading import Finding, find_reading
from d9d_lightning.runtime.batch_spec import Cut, How, resolve_specs
from d9d_lightning.runtime.batch_tree import Kind, Node, build_tree, walk
from d9d_lightning.runtime.containers import copy_containers
from d9d_lightning.runtime.outputs import merge_outputs
from d9d_lightning.runtime.sharding import shard_bounds

__all__ = ["BatchSplit", "BatchSplitter", "find_batch_size", "merge_outputs", "split_batch"]

_REMEDY = (
    "Say how the fields are cut, for example D9DStrategy(batch_spec={'x': SpecShard(0), 'mask': SpecReplicate()}), or "
    "use num_microbatches=1."
)


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """A batch cut into microbatches.

    Attributes:
        size: Number of samples in the batch; None where it cannot be known.
        microbatches: The slices, each of the type of the batch, in the order of the samples.
        sizes: Number of samples in each microbatch; ``(1,)`` where it cannot be known.
        reason: Why there are fewer microbatches than were asked for; None if there are not.
    """

    size: int | None
    microbatches: tuple[Any, ...]
    sizes: tuple[int, ...]
    reason: str | None = None


class BatchSplitter:
    """Cuts the batches of one data loader, and reads all of them alike.

    Sizes can happen to be equal in one batch: a last batch of three images, of three channels each, looks like a list
    of three fields. What an earlier batch left no doubt about decides such a case.

    Args:
        batch_spec: Tree of ``SpecShard`` and ``SpecReplicate`` for fields that shall not be read from the batch.
    """

    def __init__(self, batch_spec: Any = None) -> None:
        self._batch_spec = batch_spec
        self._form: Form = {}

    def split(self, batch: Any, num_microbatches: int) -> BatchSplit:
        """Cuts a batch; see :func:`split_batch`."""
        if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int) or num_microbatches < 1:
            raise PipelineConfigurationError(
                f"num_microbatches is {num_microbatches!r}; expected a positive integer, or 'auto' on the strategy"
            )
        root, finding = self._look_at(batch)
        if finding.conflict is not None and num_microbatches > 1:
            raise PipelineConfigurationError(
                f"The batch ({_describe(root)}) cannot be cut into {num_microbatches} microbatches: "
                f"{finding.conflict}. {_REMEDY}"
            )
        reading = finding.reading
        if reading is None:
            reason = (finding.reason or finding.conflict) if num_microbatches > 1 else None
            return BatchSplit(None, (copy_containers(batch),), (1,), reason)
        if reading.size == 0:
            return BatchSplit(0, (copy_containers(batch),), (0,), "the batch has no samples")
        count = min(num_microbatches, reading.size)
        bounds = shard_bounds(reading.size, count)
        microbatches = tuple(_take(root, reading.cut, start, stop) for start, stop in bounds)
        reason = f"the batch has {reading.size} samples" if count < num_microbatches else None
        return BatchSplit(reading.size, microbatches, tuple(stop - start for start, stop in bounds), reason)

    def find_size(self, batch: Any) -> tuple[int | None, str | None]:
        """The number of samples of a batch, or why it is not known; see :func:`find_batch_size`."""
        finding = self._look_at(batch)[1]
        if finding.reading is not None:
            return finding.reading.size, None
        return None, finding.reason or finding.conflict

    def _look_at(self, batch: Any) -> tuple[Node, Finding]:
        root = build_tree(batch)
        specs = resolve_specs(root, self._batch_spec)
        if not specs and not any(node.kind in (Kind.ARRAY, Kind.SCALAR, Kind.SEALED) for node in walk(root)):
            raise PipelineConfigurationError(
                f"The batch ({_describe(root)}) holds no tensor; expected at least one. Make tensors in the "
                f"collate_fn, or give D9DStrategy(batch_spec=...), for example SpecShard() for a list that is cut "
                f"along its length."
            )
        finding = find_reading(root, specs, self._form)
        if finding.reading is not None:
            self._form = {**finding.reading.form, **self._form}
        return root, finding


def split_batch(batch: Any, num_microbatches: int, batch_spec: Any = None) -> BatchSplit:
    """Cuts a batch into microbatches, by the rule of ``torch.tensor_split``: sizes differ by one at most.

    The batch itself is not changed. Every container in a microbatch is new; tensors are views of the batch's tensors,
    or the same tensor where every microbatch gets it whole.

    Args:
        batch: What the data loader gave.
        num_microbatches: How many microbatches are wanted. There are never more than samples.
        batch_spec: Tree of ``SpecShard`` and ``SpecReplicate`` for fields that shall not be read from the batch.

    Raises:
        PipelineConfigurationError: There is no tensor in the batch, the batch size can be read in two ways, the
            specification does not fit, or ``num_microbatches`` is not a positive integer.
    """
    return BatchSplitter(batch_spec).split(batch, num_microbatches)


def find_batch_size(batch: Any, batch_spec: Any = None) -> tuple[int | None, str | None]:
    """The number of samples of a batch, or why it is not known. Never raises for a batch that can be read in two ways.

    Args:
        batch: What the data loader gave.
        batch_spec: As for :func:`split_batch`.

    Returns:
        The batch size and None, or None and the reason.

    Raises:
        PipelineConfigurationError: There is no tensor in the batch, or the specification does not fit.
    """
    return BatchSplitter(batch_spec).find_size(batch)


def _describe(root: Node) -> str:
    if root.opened is None:
        return f"a {type(root.value).__name__}"
    keys = ", ".join(f"{key}: {type(child).__name__}" for key, child in _first_children(root))
    return f"a {type(root.value).__name__} of {keys or 'nothing'}"


def _first_children(root: Node) -> list[tuple[Any, Any]]:
    opened = root.opened
    return list(zip(opened.keys, opened.children, strict=True))[:8] if opened is not None else []


def _take(node: Node, cut: Cut, start: int, stop: int) -> Any:
    first, last = start * cut.rows_per_sample, stop * cut.rows_per_sample
    if cut.how is How.ROWS:
        if isinstance(node.value, torch.Tensor):
            return node.value.narrow(cut.dim, first, last - first)
        return node.value[(slice(None),) * cut.dim + (slice(first, last),)]
    if node.opened is not None and cut.how is How.ITEMS:
        return node.opened.rebuild([copy_containers(item) for item in node.opened.children[first:last]])
    if node.opened is not None and cut.how is How.OPEN:
        children = [_take(child, inner, start, stop) for child, inner in zip(node.children, cut.children, strict=True)]
        return node.opened.rebuild(children)
    return copy_containers(node.value)
