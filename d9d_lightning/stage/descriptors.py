"""Where the inputs of a stage come from and where its outputs go.

The first stage of a pipeline takes its inputs from the batch and the last one keeps its outputs; every other edge is a
tensor that another stage sends or waits for. :class:`TensorMeta` is what both ends of such an edge agree on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from d9d_lightning.values import ValueSpec

__all__ = [
    "EndStageOutput",
    "ReceiveStageInput",
    "SendStageOutput",
    "StageInput",
    "StageOutput",
    "StartStageInput",
    "TensorMeta",
]


_ROW_MAJOR = tuple(range(64))


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What sender and receiver of a tensor agree on.

    Attributes:
        shape: Size of each dim.
        dtype: Element type.
        dim_order: Dims from the slowest to the fastest varying one in memory; the receiver restores this layout, so
            that a ``view`` that works on the sender works on the receiver. Gaps and overlaps in memory are not kept.
        requires_grad: Whether a gradient travels back.
        device_type: Where the receiver wants it (``"cpu"``, ``"cuda"``); None for the device of its stage.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim_order: tuple[int, ...]
    requires_grad: bool = False
    device_type: str | None = None

    @classmethod
    def of(cls, described: torch.Tensor | ValueSpec | TensorMeta) -> TensorMeta:
        """Takes over the description of a tensor, usually one on the meta device, or of a value."""
        if isinstance(described, TensorMeta):
            return described
        shape = tuple(described.shape)
        if isinstance(described, torch.Tensor):
            return cls(shape, described.dtype, _dim_order(shape, described.stride()), described.requires_grad)
        order = _dim_order(shape, described.stride)
        return cls(shape, described.dtype, order, described.requires_grad, described.device)

    @property
    def _is_row_major(self) -> bool:
        return self.dim_order == _ROW_MAJOR[: len(self.shape)]

    @property
    def can_require_grad(self) -> bool:
        """Whether autograd knows gradients of this element type."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def mismatch(self, tensor: torch.Tensor) -> str | None:
        """How a tensor differs from what was agreed on; None when it fits."""
        if tensor.dtype != self.dtype:
            return f"has dtype {tensor.dtype}, expected {self.dtype}"
        if tensor.shape != self.shape:
            return f"has shape {tuple(tensor.shape)}, expected {self.shape}"
        return None

    def in_memory_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with its dims in memory order, contiguous; copies only where it is not so already."""
        return tensor.contiguous() if self._is_row_major else tensor.permute(self.dim_order).contiguous()

    def allocate(self, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor of the agreed shape, dtype and layout."""
        if self._is_row_major:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        strides = [0] * len(self.shape)
        step = 1
        for dim in reversed(self.dim_order):
            strides[dim] = step
            step *= max(self.shape[dim], 1)
        return torch.empty_strided(self.shape, strides, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class ReceiveStageInput:
    """The input is sent by another stage.

    Attributes:
        name: Name of the transfer, for messages and traces.
        from_stage: Stage that sends it.
        meta: What is received.
    """

    name: str
    from_stage: int
    meta: TensorMeta


@dataclass(frozen=True, slots=True)
class StartStageInput:
    """The pipeline starts here: the input is taken from the batch.

    Attributes:
        name: Name of the input.
    """

    name: str


@dataclass(frozen=True, slots=True)
class SendStageOutput:
    """The output is sent to another stage.

    Attributes:
        to_stage: Stage that receives it.
        meta: What is sent.
    """

    to_stage: int
    meta: TensorMeta


@dataclass(frozen=True, slots=True)
class EndStageOutput:
    """The pipeline ends here: nobody waits for the output."""


StageInput = ReceiveStageInput | StartStageInput
"""Where an input of a stage comes from."""

StageOutput = SendStageOutput | EndStageOutput
"""Where an output of a stage goes."""


def _dim_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    # Dims of size 0 or 1 may have any stride: they go where they would stand in a tensor that is contiguous there.
    order = sorted(range(len(shape)), key=lambda dim: (-_effective_stride(shape, strides, dim), dim))
    expected = 1
    for dim in reversed(order):
        if shape[dim] > 1 and strides[dim] != expected:
            return tuple(range(len(shape)))
        expected *= max(shape[dim], 1)
    return tuple(order)


def _effective_stride(shape: tuple[int, ...], strides: tuple[int, ...], dim: int) -> int:
    if shape[dim] > 1:
        return strides[dim]
    later = [strides[other] * shape[other] for other in range(dim + 1, len(shape)) if shape[other] > 1]
    return max(later, default=1)
