"""Merging what the user's step returned for each microbatch into what it would have returned for the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from d9d_lightning.errors import PipelineConfigurationError
from d9d_lightning.runtime.batch_tree import Kind, are_alike, build_tree
from d9d_lightning.runtime.containers import OpenContainer, is_sequence, open_container

__all__ = ["merge_outputs"]


def merge_outputs(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The whole-batch form of the outputs of the microbatches.

    Tensors whose dim 0 is the size of their microbatch are concatenated; floating tensors and python floats without
    dims become the mean, weighted by size; lists of one item for each sample are joined; containers are merged child by
    child. Anything else is kept if it is equal in all microbatches, and listed, one entry a microbatch, if not.

    Args:
        outputs: What the step returned, in the order of the microbatches.
        sizes: Number of samples of each microbatch.

    Raises:
        PipelineConfigurationError: The number of outputs and of sizes differ, or there are none.
    """
    if len(outputs) != len(sizes) or not outputs:
        raise PipelineConfigurationError(
            f"merge_outputs got {len(outputs)} outputs for {len(sizes)} microbatches; expected one output for each"
        )
    if len(outputs) == 1:
        return outputs[0]
    return _merge(list(outputs), list(sizes))


def _merge(outputs: list[Any], sizes: list[int]) -> Any:
    first = outputs[0]
    if all(isinstance(output, torch.Tensor) for output in outputs):
        return _merge_tensors(outputs, sizes)
    if all(type(output) is float for output in outputs):
        return _weighted_mean(outputs, sizes)
    if all(isinstance(output, np.ndarray) for output in outputs):
        return _merge_arrays(outputs, sizes)
    opened = [open_container(output) for output in outputs]
    containers = [one for one in opened if one is not None]
    if len(containers) == len(outputs) and all(type(output) is type(first) for output in outputs):
        return _merge_containers(outputs, containers, sizes)
    return first if _are_equal(outputs) else outputs


def _merge_arrays(outputs: list[Any], sizes: list[int]) -> Any:
    first = outputs[0]
    fit = all(output.shape[:1] == (size,) for output, size in zip(outputs, sizes, strict=True))
    if fit and all(output.shape[1:] == first.shape[1:] for output in outputs):
        return np.concatenate(outputs)
    equal = all(output.dtype == first.dtype and np.array_equal(output, first) for output in outputs[1:])
    return first if equal else outputs


def _merge_tensors(outputs: list[torch.Tensor], sizes: list[int]) -> Any:
    first = outputs[0]
    if all(output.dim() == 0 for output in outputs):
        if first.is_floating_point() or first.is_complex():
            return _weighted_mean(outputs, sizes)
    elif all(output.dim() > 0 and output.shape[0] == size for output, size in zip(outputs, sizes, strict=True)):
        if all(output.shape[1:] == first.shape[1:] for output in outputs):
            return torch.cat(outputs)
        # Padded to another length in each microbatch: no one tensor can hold them all.
        return outputs
    return first if _are_equal(outputs) else outputs


def _merge_containers(outputs: list[Any], opened: list[OpenContainer], sizes: list[int]) -> Any:
    first = opened[0]
    if is_sequence(outputs[0]) and _are_lists_of_samples(outputs, sizes):
        return first.rebuild([item for one in opened for item in one.children])
    if any(set(one.keys) != set(first.keys) for one in opened):
        return outputs
    by_key = [dict(zip(one.keys, one.children, strict=True)) for one in opened]
    return first.rebuild([_merge([children[key] for children in by_key], sizes) for key in first.keys])


def _are_lists_of_samples(outputs: list[Any], sizes: list[int]) -> bool:
    """Whether sequences hold one item for each sample, and do not only happen to be as long as their microbatch."""
    if any(len(output) != size for output, size in zip(outputs, sizes, strict=True)):
        return False
    if len(set(sizes)) > 1:
        return True
    items = tuple(build_tree(item) for output in outputs for item in output)
    if not are_alike(items):
        return False
    if isinstance(outputs[0], tuple):
        # `return loss, accuracy` is far more common than a tuple of samples, which would be strings or records.
        return all(item.kind is Kind.FIELDS or isinstance(item.value, str) for item in items)
    return not all(item.kind is Kind.ARRAY and item.length == sizes[0] for item in items)


def _weighted_mean(values: Sequence[Any], sizes: list[int]) -> Any:
    total = sum(sizes)
    if total == 0:
        return values[0]
    return sum(value * (size / total) for value, size in zip(values, sizes, strict=True))


def _are_equal(outputs: list[Any]) -> bool:
    first = outputs[0]
    for other in outputs[1:]:
        if isinstance(first, torch.Tensor) and isinstance(other, torch.Tensor):
            if first.dtype != other.dtype or first.device != other.device or not torch.equal(first, other):
                return False
        elif other is not first:
            try:
                if type(other) is not type(first) or not bool(other == first):
                    return False
            except (ValueError, TypeError, RuntimeError):
                # Objects whose == has no single truth value (arrays) count as different.
                return False
    return True
