"""Operators that are asked on the meta device answer there as they do where they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from d9d_lightning.partition import shapes
from d9d_lightning.partition.device_blind import is_device_blind
from d9d_lightning.partition.placeholder import Placeholder

ATEN = torch.ops.aten


def layouts(*shape: int) -> list[Tensor]:
    """Tensors of one shape, laid out in memory in several ways."""
    backward = torch.rand(shape[::-1]).permute(*range(len(shape) - 1, -1, -1))
    spaced = torch.rand(*shape[:-1], 2 * shape[-1])[..., ::2]
    repeated = torch.rand(1, *shape[1:]).expand(shape)
    shifted = torch.rand(shape[0] + 1, *shape[1:])[1:]
    return [torch.rand(shape), backward, spaced, repeated, shifted]


def products() -> list[tuple[Any, tuple[Any, ...]]]:
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    for left in layouts(3, 4):
        for right in layouts(4, 5):
            calls += [(ATEN.mm.default, (left, right)), (ATEN.addmm.default, (torch.rand(5), left, right))]
    for left, right in zip(layouts(2, 3, 4), layouts(2, 4, 5)[::-1], strict=True):
        calls += [(ATEN.bmm.default, (left, right)), (ATEN.baddbmm.default, (torch.rand(2, 1, 5), left, right))]
    return calls


def elementwise() -> list[tuple[Any, tuple[Any, ...]]]:
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    one = "neg abs exp log sqrt rsqrt sin cos tanh sigmoid relu gelu silu"
    two = [ATEN.add.Tensor, ATEN.sub.Tensor, ATEN.mul.Tensor, ATEN.div.Tensor, ATEN.maximum.default]
    for x in layouts(2, 3, 4):
        calls += [(getattr(ATEN, name).default, (x,)) for name in one.split()]
        calls += [(op, (x, y)) for op in two for y in (*layouts(2, 3, 4), torch.tensor(2.0), torch.rand(3, 1))]
        calls += [(ATEN.mul.Tensor, (x, 2)), (ATEN.add.Tensor, (x, torch.ones(4, dtype=torch.long)))]
        calls += [(ATEN.pow.Tensor_Scalar, (x, 2)), (ATEN.minimum.default, (x, x)), (ATEN.where.self, (x > 0.5, x, x))]
        calls += [(ATEN.add.Tensor, (x.bfloat16(), torch.tensor(1.0)))]
    return calls


def reductions() -> list[tuple[Any, tuple[Any, ...]]]:
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    for x in layouts(2, 3, 4):
        calls += [(ATEN.mean.dim, (x, [-1], True)), (ATEN.sum.dim_IntList, (x, [0, 2])), (ATEN.mean.default, (x,))]
        calls += [(ATEN._softmax.default, (x, 1, False)), (ATEN._log_softmax.default, (x, -1, False))]
    for x in layouts(3, 4):
        for reduction in range(3):
            calls.append((ATEN.nll_loss_forward.default, (x, torch.tensor([1, 0, 3]), None, reduction, -100)))
    return calls


def views() -> list[tuple[Any, tuple[Any, ...]]]:
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    for x in layouts(2, 3, 4):
        calls += [(ATEN.permute.default, (x, [2, 0, 1])), (ATEN.transpose.int, (x, 0, 2)), (ATEN.unbind.int, (x, 1))]
        calls += [(ATEN.select.int, (x, 1, 2)), (ATEN.slice.Tensor, (x, 2, 1, 4, 2)), (ATEN.detach.default, (x,))]
        calls += [(ATEN.split.Tensor, (x, 2, 2)), (ATEN.unsqueeze.default, (x, 1)), (ATEN.diagonal.default, (x,))]
        calls += [(ATEN.cat.default, ([x, y], dim)) for y in layouts(2, 3, 4) for dim in (0, 2)]
    calls += [(ATEN._unsafe_view.default, (torch.rand(6, 4), [2, 3, 4]))]
    return [*calls, (ATEN.view.default, (torch.rand(2, 3, 4)[1:], [3, 4])), (ATEN.view.dtype, (x, torch.int32))]


@pytest.mark.parametrize("calls", [products, elementwise, reductions, views])
def test_the_meta_device_answers_as_the_kernel_does(calls: Callable[[], Any]) -> None:
    """Shapes, strides, offsets, types, devices and aliases are those of a real run and of torch's fake tensors."""
    for func, args in calls():
        assert is_device_blind(func, shapes.tensors_of(args)), func
        with torch.no_grad():
            found = shapes._infer_on_meta(func, args, {})
            assert found == shapes._infer_by_running(func, args, {}, Placeholder), (func, args)
            assert found == shapes._infer_by_fake(func, args, {}), (func, args)


def test_what_depends_on_the_device_is_not_asked_on_the_meta_device() -> None:
    """Factories, moves, convolutions, writes, mixed devices, conjugates and sparse tensors take the long way."""
    x = torch.rand(2, 2)
    blind = [
        (ATEN._to_copy.default, [x]),
        (ATEN.to.device, [x]),
        (ATEN.reshape.default, [x]),
        (ATEN.convolution.default, [x]),
        (ATEN.new_zeros.default, [x]),
        (ATEN.add_.Tensor, [x, x]),
        (ATEN.unsqueeze_.default, [x]),
        (ATEN.mm.out, [x, x, x]),
        (ATEN.add.Tensor, [x, x.to("meta")]),
        (ATEN.mul.Tensor, [torch.view_as_complex(x).conj()]),
        (ATEN.mm.default, [x.to_sparse(), x]),
        (ATEN.add.Tensor, []),
    ]
    assert not [func for func, tensors in blind if is_device_blind(func, tensors)]
