"""Promises of the descriptors of stage inputs and outputs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from d9d_lightning.stage.descriptors import (
    EndStageOutput,
    ReceiveStageInput,
    SendStageOutput,
    StageInput,
    StageOutput,
    StartStageInput,
    TensorMeta,
)
from d9d_lightning.values import ValueSpec

LAYOUTS: dict[str, torch.Tensor] = {
    "contiguous": torch.rand(2, 3, 4),
    "transposed": torch.rand(3, 2).t(),
    "permuted": torch.rand(2, 3, 4).permute(2, 0, 1),
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "one channel": torch.rand(2, 1, 4, 5).to(memory_format=torch.channels_last),
    "one image": torch.rand(1, 3, 4, 5).to(memory_format=torch.channels_last),
    "no dims": torch.tensor(1.0),
    "no elements": torch.rand(3, 0, 2),
}
GAPS: dict[str, torch.Tensor] = {
    "expanded": torch.rand(3, 1).expand(3, 4),
    "strided": torch.rand(4, 6)[:, ::2],
    "sliced": torch.rand(4, 6)[:, :3],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_dense_layout_is_restored(name: str) -> None:
    """A buffer has the strides of the tensor it was described by, and lies in memory without a copy."""
    tensor = LAYOUTS[name]
    meta = TensorMeta.of(tensor)
    buffer = meta.allocate(torch.device("cpu"))
    assert (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype)
    strides = zip(buffer.stride(), tensor.stride(), tensor.shape, strict=True)
    assert all(ours == theirs for ours, theirs, size in strides if size > 1 and tensor.numel() > 0)
    assert meta.in_memory_order(tensor).data_ptr() == tensor.data_ptr()
    assert meta.in_memory_order(buffer).data_ptr() == buffer.data_ptr()


@pytest.mark.parametrize("name", GAPS)
def test_gaps_and_overlaps_become_contiguous(name: str) -> None:
    """A tensor that does not fill its memory once is described, and sent, as a contiguous one."""
    tensor = GAPS[name]
    meta = TensorMeta.of(tensor)
    assert meta.allocate(torch.device("cpu")).is_contiguous()
    assert meta.in_memory_order(tensor).is_contiguous()
    assert torch.equal(meta.in_memory_order(tensor), tensor)


def test_a_value_specification_describes_a_tensor() -> None:
    """Shape, dtype, layout and the need of a gradient are taken from a value's specification."""
    spec = ValueSpec((2, 3), (1, 2), torch.float16, device="cpu", requires_grad=True)
    meta = TensorMeta.of(spec)
    assert meta == TensorMeta((2, 3), torch.float16, (1, 0), True, "cpu")
    assert TensorMeta.of(meta) is meta


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float32, True), (torch.bfloat16, True), (torch.complex64, True), (torch.int64, False), (torch.bool, False)],
)
def test_only_float_and_complex_can_require_gradients(dtype: torch.dtype, expected: bool) -> None:
    """Integers and booleans carry no gradient."""
    assert TensorMeta.of(torch.empty(2, dtype=dtype)).can_require_grad is expected


def test_a_mismatch_names_what_was_given_and_expected() -> None:
    """Dtype and shape are compared and both sides of a difference are told."""
    meta = TensorMeta.of(torch.rand(2, 3))
    assert meta.mismatch(torch.rand(2, 3)) is None
    assert meta.mismatch(torch.rand(2, 3).double()) == "has dtype torch.float64, expected torch.float32"
    assert meta.mismatch(torch.rand(3, 2)) == "has shape (3, 2), expected (2, 3)"


def test_descriptors_are_frozen_and_told_apart_by_type() -> None:
    """A stage input is received or starts the pipeline; an output is sent or ends it."""
    meta = TensorMeta.of(torch.rand(2))
    inputs: list[StageInput] = [ReceiveStageInput("x", 0, meta), StartStageInput("x")]
    outputs: list[StageOutput] = [SendStageOutput(2, meta), EndStageOutput()]
    assert all(isinstance(one, StageInput) for one in inputs)
    assert all(isinstance(one, StageOutput) for one in outputs)
    with pytest.raises(dataclasses.FrozenInstanceError):
        inputs[0].name = "y"  # type: ignore[misc]
