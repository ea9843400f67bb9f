"""How to compute the weight gradients of one autograd node by itself, later, without its input gradient.

Autograd computes the two gradients of ``x @ w`` in one node. A split backward wants the one of ``x`` now, the one of
``w`` later, and nothing twice. For the nodes that carry almost all weights of ordinary networks this file says which
saved tensors the second half needs and how it follows from them. The formulas call the kernels that autograd calls.
Nodes without a rule are run a second time by the weight pass instead.

A rule reads its tensors *before* the backward, so that the graph can be freed while the weight gradients still wait:
what is kept then is the input of each layer and the gradient of its output, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from d9d_lightning.stage.scratch import Scratch

__all__ = ["WEIGHT_RULES", "HookedTensorError", "WeightRule"]

Saved = tuple[Any, ...]
Slots = tuple[int, ...]


class HookedTensorError(Exception):
    """Reading a saved tensor would run user code: a hook that recomputes or loads it. Never leaves this package."""


@dataclass(frozen=True, slots=True)
class WeightRule:
    """The second half of one kind of node.

    Attributes:
        read: ``(node, slots)`` to the saved values that the gradients of ``slots`` need. A slot is the position of an
            argument among the differentiable ones, as in ``node.next_functions``. Raises :class:`HookedTensorError`.
        gradients: ``(saved, slots, gradient of the first output, memory to use)`` to one gradient for each slot, not
            yet reduced to the argument's shape where the operation broadcasts; the engine does that.
        is_joint: All slots come from one kernel, so they must be asked for together.
    """

    read: Callable[[Any, Slots], Saved]
    gradients: Callable[[Saved, Slots, Tensor, Scratch], Sequence[Tensor]]
    is_joint: bool = False


def _read(node: Any, name: str) -> Tensor | None:
    """A saved tensor without the graph behind it."""
    if getattr(node, f"_raw_saved_{name}").unpack_hook is not None:
        raise HookedTensorError
    tensor: Tensor | None = getattr(node, f"_saved_{name}")
    return None if tensor is None else tensor.detach()


def _scale(gradient: Tensor, factor: Any) -> Tensor:
    if factor == 1:
        return gradient
    return gradient * (factor.conjugate() if isinstance(factor, complex) else factor)


def _is_column_major(other: Tensor, sizes: Sequence[int], strides: Sequence[int]) -> bool:
    return other.layout is torch.strided and len(strides) == 2 and strides[0] == 1 and strides[1] == sizes[0]


def _left_gradient(
    scratch: Scratch, gradient: Tensor, right: Tensor, sizes: Sequence[int], strides: Sequence[int]
) -> Tensor:
    """Gradient of ``a`` in ``a @ right``, in the memory order of ``a``."""
    if _is_column_major(right, sizes, strides):
        return scratch.multiply(right.conj(), gradient.t()).t()
    return scratch.multiply(gradient, right.t().conj())


def _right_gradient(
    scratch: Scratch, gradient: Tensor, left: Tensor, sizes: Sequence[int], strides: Sequence[int]
) -> Tensor:
    """Gradient of ``b`` in ``left @ b``, in the memory order of ``b``."""
    if _is_column_major(left, sizes, strides):
        return scratch.multiply(gradient.t(), left.conj()).t()
    return scratch.multiply(left.t().conj(), gradient)


def _read_mm(node: Any, slots: Slots) -> Saved:
    left = (_read(node, "mat2"), node._saved_self_sym_sizes, node._saved_self_sym_strides) if 0 in slots else None
    right = (_read(node, "self"), node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides) if 1 in slots else None
    return left, right


def _gradients_of_mm(saved: Saved, slots: Slots, gradient: Tensor, scratch: Scratch) -> Sequence[Tensor]:
    left, right = saved
    results = []
    for slot in slots:
        if slot == 0:
            results.append(_left_gradient(scratch, gradient, *left))
        else:
            results.append(_right_gradient(scratch, gradient, *right))
    return results


def _read_addmm(node: Any, slots: Slots) -> Saved:
    left = (_read(node, "mat2"), node._saved_mat1_sym_sizes, node._saved_mat1_sym_strides) if 1 in slots else None
    right = (_read(node, "mat1"), node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides) if 2 in slots else None
    return node._saved_beta, node._saved_alpha, left, right


def _gradients_of_addmm(saved: Saved, slots: Slots, gradient: Tensor, scratch: Scratch) -> Sequence[Tensor]:
    beta, alpha, left, right = saved
    results = []
    for slot in slots:
        if slot == 0:
            results.append(_scale(gradient, beta))
        elif slot == 1:
            results.append(_scale(_left_gradient(scratch, gradient, *left), alpha))
        else:
            results.append(_scale(_right_gradient(scratch, gradient, *right), alpha))
    return results


def _left_batched(gradient: Tensor, right: Tensor) -> Tensor:
    return gradient.bmm(right.transpose(1, 2).conj())


def _right_batched(gradient: Tensor, left: Tensor) -> Tensor:
    return left.transpose(1, 2).conj().bmm(gradient)


def _read_bmm(node: Any, slots: Slots) -> Saved:
    return (_read(node, "mat2") if 0 in slots else None, _read(node, "self") if 1 in slots else None)


def _gradients_of_bmm(saved: Saved, slots: Slots, gradient: Tensor, scratch: Scratch) -> Sequence[Tensor]:
    right, left = saved
    return [_right_batched(gradient, left) if slot else _left_batched(gradient, right) for slot in slots]


def _read_baddbmm(node: Any, slots: Slots) -> Saved:
    right = _read(node, "batch2") if 1 in slots else None
    left = _read(node, "batch1") if 2 in slots else None
    return node._saved_beta, node._saved_alpha, right, left


def _gradients_of_baddbmm(saved: Saved, slots: Slots, gradient: Tensor, scratch: Scratch) -> Sequence[Tensor]:
    beta, alpha, right, left = saved
    results = []
    for slot in slots:
        if slot == 0:
            results.append(_scale(gradient, beta))
        elif slot == 1:
            results.append(_scale(_left_batched(gradient, right), alpha))
        else:
            results.append(_scale(_right_batched(gradient, left), alpha))
    return results


def _read_grouped_mm(node: Any, slots: Slots) -> Saved:
    left = (_read(node, "mat2"), node._saved_self_sym_sizes, node._saved_self_sym_strides) if 0 in slots else None
    right = (_read(node, "self"), node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides) if 1 in slots else None
    return _read(node, "offs"), left, right


def _gradients_of_grouped_mm(saved: Saved, slots: Slots, gradient: Tensor, scratch: Scratch) -> Sequence[Tensor]:
    offsets, *factors = saved
    return [(_grouped_left, _grouped_right)[slot](gradient, offsets, *factors[slot]) for slot in slots]


def _grouped_left(gradient: Tensor, offsets: Tensor | None, right: Tensor, sizes: Any, strides: Any) -> Tensor:
    if _is_column_major(right, sizes[-2:], strides[-2:]):
        return functional.grouped_mm(right, gradient.mT, offs=offsets).mT
    return functional.grouped_mm(gradient, right.mT, offs=offsets)


def _grouped_right(gradient: Tensor, offsets: Tensor | None, left: Tensor, sizes: Any, strides: Any) -> Tensor:
    if _is_column_major(left, sizes[-2:], strides[-2:]):
        return functional.grouped_mm(gradient.mT, left, offs=offsets).mT
    return functional.grouped_mm(left.mT, gradient, offs=offsets)


def _read_mul(node: Any, slots: Slots) -> Saved:
    return (_read(node, "other") if 0 in slots else None, _read(node, "self") if 1 in slots else None)


def _gradients_of_mul(saved: Saved, slots: Slots, gradient: Tensor, scratch: Scratch) -> Sequence[Tensor]:
    return [gradient * saved[slot].conj() for slot in slots]


def _read_alpha(node: Any, slots: Slots) -> Saved:
    return (node._saved_alpha,)


def _gradients_of_add(saved: Saved, slots: Slots, gradient: Tensor, scratch: Scratch) -> Sequence[Tensor]:
    return [_scale(gradient, saved[0]) if slot else gradient for slot in slots]


def _gradients_of_sub(saved: Saved, slots: Slots, gradient: Tensor, scratch: Scratch) -> Sequence[Tensor]:
    return [-_scale(gradient, saved[0]) if slot else gradient for slot in slots]


def _masked(slots: Slots, results: Sequence[Tensor]) -> Sequence[Tensor]:
    return [results[slot] for slot in slots]


def _mask(slots: Slots) -> list[bool]:
    return [slot in slots for slot in range(3)]


def _read_convolution(node: Any, slots: Slots) -> Saved:
    tensors = (_read(node, "input"), _read(node, "weight"), node._saved_bias_sym_sizes_opt)
    geometry = (node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_transposed)
    return (*tensors, *geometry, node._saved_output_padding, node._saved_groups)


def _gradients_of_convolution(saved: Saved, slots: Slots, gradient: Tensor, scratch: Scratch) -> Sequence[Tensor]:
    return _masked(slots, torch.ops.aten.convolution_backward.default(gradient, *saved, _mask(slots)))


def _read_layer_norm(node: Any, slots: Slots) -> Saved:
    tensors = (_read(node, "input"), _read(node, "result1"), _read(node, "result2"))
    return (*tensors, _read(node, "weight"), _read(node, "bias"), node._saved_normalized_shape)


def _gradients_of_layer_norm(saved: Saved, slots: Slots, gradient: Tensor, scratch: Scratch) -> Sequence[Tensor]:
    values, mean, inverse_deviation, weight, bias, shape = saved
    backward = torch.ops.aten.native_layer_norm_backward.default
    return _masked(slots, backward(gradient, values, shape, mean, inverse_deviation, weight, bias, _mask(slots)))


def _read_group_norm(node: Any, slots: Slots) -> Saved:
    tensors = (_read(node, "input"), _read(node, "result1"), _read(node, "result2"), _read(node, "weight"))
    return (*tensors, node._saved_N, node._saved_C, node._saved_HxW, node._saved_group)


def _gradients_of_group_norm(saved: Saved, slots: Slots, gradient: Tensor, scratch: Scratch) -> Sequence[Tensor]:
    # autograd hands its kernel a contiguous gradient and input as well
    values, *rest = saved
    backward = torch.ops.aten.native_group_norm_backward.default
    return _masked(slots, backward(gradient.contiguous(), values.contiguous(), *rest, _mask(slots)))


def _read_batch_norm(node: Any, slots: Slots) -> Saved:
    tensors = (_read(node, "input"), _read(node, "weight"))
    running = (_read(node, "running_mean"), _read(node, "running_var"))
    batch = (_read(node, "result1"), _read(node, "result2"))
    return (*tensors, *running, *batch, node._saved_training, node._saved_eps)


def _gradients_of_batch_norm(saved: Saved, slots: Slots, gradient: Tensor, scratch: Scratch) -> Sequence[Tensor]:
    return _masked(slots, torch.ops.aten.native_batch_norm_backward.default(gradient, *saved, _mask(slots)))


WEIGHT_RULES: Mapping[str, WeightRule] = MappingProxyType(
    {
        "AddBackward0": WeightRule(_read_alpha, _gradients_of_add),
        "AddmmBackward0": WeightRule(_read_addmm, _gradients_of_addmm),
        "BaddbmmBackward0": WeightRule(_read_baddbmm, _gradients_of_baddbmm),
        "BmmBackward0": WeightRule(_read_bmm, _gradients_of_bmm),
        "ConvolutionBackward0": WeightRule(_read_convolution, _gradients_of_convolution, is_joint=True),
        "GroupedMmBackward0": WeightRule(_read_grouped_mm, _gradients_of_grouped_mm),
        "MmBackward0": WeightRule(_read_mm, _gradients_of_mm),
        "MulBackward0": WeightRule(_read_mul, _gradients_of_mul),
        "NativeBatchNormBackward0": WeightRule(_read_batch_norm, _gradients_of_batch_norm, is_joint=True),
        "NativeGroupNormBackward0": WeightRule(_read_group_norm, _gradients_of_group_norm, is_joint=True),
        "NativeLayerNormBackward0": WeightRule(_read_layer_norm, _gradients_of_layer_norm, is_joint=True),
        "SubBackward0": WeightRule(_read_alpha, _gradients_of_sub),
    }
)
"""The rule of each kind of node, by the name of its type."""
