"""Point-to-point operations of one stage in one direction: the only place that builds them.

A :class:`StageCommunicationHandler` knows what its stage receives and sends, checks every tensor against that before
it leaves, and owns the buffers that tensors arrive in. It starts nothing and waits for nothing: it says
what is to be moved, in one order that both ends derive from the names, and the transport moves it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from d9d_lightning.errors import PipelineTransferError, PipelineTransferNameError
from d9d_lightning.stage.descriptors import (
    EndStageOutput,
    ReceiveStageInput,
    SendStageOutput,
    StageInput,
    StageOutput,
    StartStageInput,
    TensorMeta,
)

if TYPE_CHECKING:
    from d9d_lightning.values import ValueSpec

__all__ = ["StageCommunicationHandler", "Wire"]

Wire = tuple[torch.Tensor, int]
"""A contiguous tensor to send or to receive into, and the rank of the peer in the group."""

# NCCL has no message type for the other ones; their bytes travel instead.
_PLAIN_DTYPES = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)


class StageCommunicationHandler:
    """What one stage receives and sends in one direction.

    Args:
        name: Direction, for messages and names of transfers: ``"fwd"`` or ``"bwd"``.
        stage_index: The stage.
        num_microbatches: Number of microbatches of a step.
        input_stage_index: Stage that the inputs come from; None where the pipeline starts.
        input_args: The inputs by name: tensors (best on the meta device) or value specifications.
        output_stage_index: Stage that the outputs go to; None where the pipeline ends.
        output_args: The outputs by name, likewise.
        stage_idx_to_host_rank: Rank, within ``group``, of every stage.
        group: Process group of the pipeline; None for the default group. Not looked at before an operation is built.
        device: Device of the stage, where its inputs end up; None for the one that the group's backend works on.

    Raises:
        PipelineTransferError: ``num_microbatches`` is not positive, or a neighbour is on no known rank.
    """

    def __init__(
        self,
        name: str,
        stage_index: int,
        num_microbatches: int,
        input_stage_index: int | None,
        input_args: Mapping[str, torch.Tensor | ValueSpec | TensorMeta],
        output_stage_index: int | None,
        output_args: Mapping[str, torch.Tensor | ValueSpec | TensorMeta],
        stage_idx_to_host_rank: Mapping[int, int],
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if num_microbatches < 1:
            raise PipelineTransferError(f"num_microbatches is {num_microbatches}; expected at least 1")
        self._name = name
        self._stage_index = stage_index
        self._num_microbatches = num_microbatches
        self._stage_to_rank = dict(stage_idx_to_host_rank)
        self._group = group
        self._device = None if device is None else torch.device(device)
        self._inputs = {
            key: self._describe_input(key, input_stage_index, input_args[key]) for key in sorted(input_args)
        }
        self._outputs = {
            key: self._describe_output(output_stage_index, output_args[key]) for key in sorted(output_args)
        }
        self._received = {key: entry for key, entry in self._inputs.items() if isinstance(entry, ReceiveStageInput)}
        self._expected = {key: entry for key, entry in self._outputs.items() if isinstance(entry, SendStageOutput)}
        for neighbour in (input_stage_index, output_stage_index):
            if neighbour is not None and neighbour not in self._stage_to_rank:
                raise PipelineTransferError(
                    f"{self}: stage {neighbour} has no rank; known stages are {sorted(self._stage_to_rank)}"
                )
        self._requires_grad: bool | None = None
        self._buffers: dict[int, dict[str, torch.Tensor]] = {}
        self._peers: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name}, stage {self._stage_index})"

    @property
    def inputs(self) -> Mapping[str, StageInput]:
        """The inputs by name, in wire order."""
        return self._inputs

    @property
    def outputs(self) -> Mapping[str, StageOutput]:
        """The outputs by name, in wire order."""
        return self._outputs

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group that the messages go through."""
        group = dist.group.WORLD if self._group is None else self._group
        if group is None:
            raise PipelineTransferError(f"{self}: there is no process group; call init_process_group() first")
        return group

    @property
    def waiting_microbatches(self) -> tuple[int, ...]:
        """Microbatches whose buffers exist: received or handed over, and not yet taken."""
        return tuple(sorted(self._buffers))

    def set_input_requires_grad_(self, requires_grad: bool) -> None:
        """Makes all inputs require a gradient, or none, in place of what each was described with.

        Integer and boolean inputs never require one.
        """
        self._requires_grad = requires_grad

    def create_receive_ops(self, microbatch_index: int) -> list[dist.P2POp]:
        """Allocates buffers for the inputs of a microbatch and builds the operations that fill them.

        Args:
            microbatch_index: The microbatch.

        Returns:
            One operation for each input that has elements, sorted by name. None where the pipeline starts.

        Raises:
            PipelineTransferError: As :meth:`create_receives`.
        """
        return self.receive_ops(self.create_receives(microbatch_index))

    def receive_ops(self, wires: Sequence[Wire]) -> list[dist.P2POp]:
        """Operations that fill what :meth:`create_receives` gave."""
        return [dist.P2POp(dist.irecv, wire, group=self._group, group_peer=peer) for wire, peer in wires]

    def create_receives(self, microbatch_index: int) -> list[Wire]:
        """Allocates buffers for the inputs of a microbatch, and says what is to be received into them from whom.

        Args:
            microbatch_index: The microbatch.

        Returns:
            A contiguous tensor and the rank of its sender in the group, for each input that has elements, sorted by
            name.

        Raises:
            PipelineTransferError: There is no such microbatch, it is being received already, or its sender is on this
                very rank.
        """
        self._check_microbatch(microbatch_index)
        if not self._received:
            return []
        if microbatch_index in self._buffers:
            raise PipelineTransferError(
                f"{self}: microbatch {microbatch_index} is received twice; take it with get_inputs() first"
            )
        buffers = {key: entry.meta.allocate(self._wire_device) for key, entry in self._received.items()}
        wires = []
        for key, entry in self._received.items():
            wire = _wire_form(entry.meta.in_memory_order(buffers[key]))
            if wire.numel() > 0:
                wires.append((wire, self._peer_of(entry.from_stage)))
        self._buffers[microbatch_index] = buffers
        return wires

    def create_send_ops(self, outputs: Mapping[str, torch.Tensor]) -> list[dist.P2POp]:
        """Builds the operations that send the outputs of a microbatch.

        Args:
            outputs: Tensors by name. Those that the next stage does not expect are ignored.

        Returns:
            One operation for each expected output that has elements, sorted by name. None where the pipeline ends.

        Raises:
            PipelineTransferNameError: As :meth:`create_sends`.
            PipelineTransferError: As :meth:`create_sends`.
        """
        return self.send_ops(self.create_sends(outputs))

    def send_ops(self, wires: Sequence[Wire]) -> list[dist.P2POp]:
        """Operations that send what :meth:`create_sends` gave."""
        return [dist.P2POp(dist.isend, wire, group=self._group, group_peer=peer) for wire, peer in wires]

    def create_sends(self, outputs: Mapping[str, torch.Tensor]) -> list[Wire]:
        """Says what is to be sent to whom for the outputs of a microbatch.

        Args:
            outputs: Tensors by name. Those that the next stage does not expect are ignored.

        Returns:
            A contiguous tensor and the rank of its receiver in the group, for each expected output that has elements,
            sorted by name.

        Raises:
            PipelineTransferNameError: An expected output is missing.
            PipelineTransferError: The dtype or shape of an output is not what the receiver expects, or the receiver is
                on this very rank.
        """
        missing = [key for key in self._expected if key not in outputs]
        if missing:
            to_stage = self._expected[missing[0]].to_stage
            raise PipelineTransferNameError(
                f"{self}: stage {to_stage} expects {list(self._expected)}, but stage {self._stage_index} gave "
                f"{sorted(outputs)}; missing: {missing}"
            )
        wires = []
        for key, entry in self._expected.items():
            value = outputs[key]
            self._check_tensor(key, entry.meta, value, entry.to_stage)
            if value.requires_grad:
                value = value.detach()
            if value.device != self._wire_device:
                value = value.to(self._wire_device)
            wire = _wire_form(entry.meta.in_memory_order(value))
            if wire.numel() > 0:
                wires.append((wire, self._peer_of(entry.to_stage)))
        return wires

    def set_inputs_local(self, inputs: Mapping[str, torch.Tensor], microbatch_index: int) -> None:
        """Hands over inputs from a stage of the same rank. They alias the given tensors, without their history.

        Args:
            inputs: Tensors by name.
            microbatch_index: The microbatch.

        Raises:
            PipelineTransferNameError: An input is not known.
            PipelineTransferError: The pipeline starts here, or an input is not what was agreed on.
        """
        self._check_microbatch(microbatch_index)
        unknown = [key for key in inputs if key not in self._inputs]
        if unknown:
            raise PipelineTransferNameError(
                f"{self}: was handed {sorted(inputs)}, but stage {self._stage_index} expects {list(self._inputs)}; "
                f"unknown: {unknown}"
            )
        handed = {}
        for key, tensor in inputs.items():
            entry = self._inputs[key]
            if isinstance(entry, StartStageInput):
                raise self._no_sender(f"input {key!r} cannot be handed over")
            self._check_tensor(key, entry.meta, tensor, self._stage_index)
            handed[key] = tensor.detach()
        self._buffers.setdefault(microbatch_index, {}).update(handed)

    def get_inputs(self, microbatch_index: int) -> dict[str, torch.Tensor]:
        """Takes the inputs of a microbatch, once: the handler forgets them, so that they are freed after their use.

        Args:
            microbatch_index: The microbatch. Its receive operations must have finished.

        Returns:
            Tensors by name, sorted by name. Leaves of a new graph, where a gradient travels back.

        Raises:
            PipelineTransferNameError: The inputs were not received, in part or at all, or were taken before.
            PipelineTransferError: The pipeline starts here.
        """
        self._check_microbatch(microbatch_index)
        if len(self._received) < len(self._inputs):
            started = [key for key in self._inputs if key not in self._received]
            raise self._no_sender(f"inputs {started} are taken from the batch")
        buffers = self._buffers.get(microbatch_index, {})
        missing = [key for key in self._inputs if key not in buffers]
        if missing:
            raise PipelineTransferNameError(
                f"{self}: inputs {missing} of microbatch {microbatch_index} are not there; they can be taken once, "
                f"after create_receive_ops() or set_inputs_local(). Waiting microbatches: {list(self._buffers)}"
            )
        self._buffers.pop(microbatch_index, None)
        return {key: self._as_leaf(key, buffers[key]) for key in self._inputs}

    def reset(self) -> None:
        """Drops all buffers, as after a step that failed."""
        self._buffers.clear()

    def _describe_input(
        self, key: str, stage: int | None, described: torch.Tensor | ValueSpec | TensorMeta
    ) -> StageInput:
        if stage is None:
            return StartStageInput(key)
        name = f"{self._name}_recv_from_{stage}_to_{self._stage_index}[{key}]"
        return ReceiveStageInput(name, stage, TensorMeta.of(described))

    def _describe_output(self, stage: int | None, described: torch.Tensor | ValueSpec | TensorMeta) -> StageOutput:
        return EndStageOutput() if stage is None else SendStageOutput(stage, TensorMeta.of(described))

    def _as_leaf(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        meta = self._received[key].meta
        device = self._device_of(meta, tensor)
        if tensor.device != device:
            tensor = tensor.to(device)
        wanted = meta.requires_grad if self._requires_grad is None else self._requires_grad
        return tensor.requires_grad_(wanted and meta.can_require_grad)

    def _device_of(self, meta: TensorMeta, received: torch.Tensor) -> torch.device:
        if meta.device_type is None or (self._device is not None and self._device.type == meta.device_type):
            return received.device if self._device is None else self._device
        return received.device if received.device.type == meta.device_type else torch.device(meta.device_type)

    @functools.cached_property
    def _wire_device(self) -> torch.device:
        """Where a tensor has to be for the backend of the group to carry it."""
        backend = dist.get_backend(self._group)
        if backend == "nccl" and (self._device is None or self._device.type != "cuda"):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu") if backend == "gloo" or self._device is None else self._device

    def _peer_of(self, stage: int) -> int:
        peer = self._peers.get(stage)
        if peer is None:
            peer = self._peers[stage] = self._find_peer(stage)
        return peer

    def _find_peer(self, stage: int) -> int:
        """Rank of a stage in the group."""
        rank = self._stage_to_rank[stage]
        if rank == dist.get_rank(self.group):
            raise PipelineTransferError(
                f"{self}: stage {stage} is on this very rank ({rank}); hand over with set_inputs_local() instead"
            )
        return rank

    def _check_microbatch(self, microbatch_index: int) -> None:
        if not 0 <= microbatch_index < self._num_microbatches:
            raise PipelineTransferError(
                f"{self}: microbatch {microbatch_index} does not exist; expected 0 to {self._num_microbatches - 1}"
            )

    def _check_tensor(self, key: str, meta: TensorMeta, tensor: torch.Tensor, receiver: int) -> None:
        mismatch = meta.mismatch(tensor)
        if mismatch is not None:
            raise PipelineTransferError(f"{self}: {key!r} for stage {receiver} {mismatch}; nothing was sent")

    def _no_sender(self, what: str) -> PipelineTransferError:
        return PipelineTransferError(f"{self}: {what}, since the pipeline starts at stage {self._stage_index}")


def _wire_form(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as something every backend can carry, without copying it where its bits are its values."""
    if tensor.is_complex():
        # A lazy conjugate shares the bits of its source; the receiver must get those of its own.
        return torch.view_as_real(tensor.resolve_conj().resolve_neg())
    if tensor.dtype in _PLAIN_DTYPES:
        return tensor.resolve_neg()
    return tensor.reshape(-1).view(torch.uint8)
