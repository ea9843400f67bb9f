"""Promises of ``StageCommunicationHandler``, between real gloo processes where something is sent."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from d9d_lightning.errors import PipelineTransferError
from d9d_lightning.runtime.communication import StageCommunicationHandler
from d9d_lightning.stage.descriptors import EndStageOutput, ReceiveStageInput, SendStageOutput, StartStageInput
from d9d_lightning.testing.processes import distributed
from d9d_lightning.values import ValueSpec

LOOP = {0: 0, 1: 1}


def tensors() -> dict[str, torch.Tensor]:
    """One tensor of every kind that a stage may send; equal on every rank."""
    torch.manual_seed(0)
    base = torch.rand(4, 6)
    return {
        "bfloat16": base.bfloat16(),
        "bool": base > 0.5,
        "complex": torch.complex(base, -base),
        "conjugate": torch.complex(base, base).conj(),
        # A single element is contiguous, so that only its lazy sign is left to resolve.
        "conjugate_part": torch.complex(base, base).flatten()[:1].conj().imag,
        "empty": torch.rand(0, 3),
        "expanded": base[:, :1].expand(4, 6),
        "float32": base,
        "float64": base.double(),
        "float8": base.to(torch.float8_e4m3fn),
        "images": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "int16": (base * 100).short(),
        "int64": (base * 100).long(),
        "no_dims": torch.tensor(3.5),
        "strided": base[:, ::2],
        "transposed": base.t(),
        "uint8": (base * 100).byte(),
    }


def described(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        key: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        for key, value in values.items()
    }


def make_handler(
    stage: int, inputs: dict[str, Any], outputs: dict[str, Any], **options: Any
) -> StageCommunicationHandler:
    """One of two stages; stage 0 starts the pipeline and stage 1 ends it."""
    return StageCommunicationHandler(
        name="fwd",
        stage_index=stage,
        num_microbatches=options.pop("num_microbatches", 3),
        input_stage_index=None if stage == 0 else stage - 1,
        input_args=inputs,
        output_stage_index=None if stage == 1 else stage + 1,
        output_args=outputs,
        stage_idx_to_host_rank=options.pop("stage_idx_to_host_rank", LOOP),
        **options,
    )


def run(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.dtype == torch.float8_e4m3fn:
        first, second = first.float(), second.float()
    return first.shape == second.shape and torch.equal(first, second)


# ---- what is sent


@distributed(ranks=2)
def test_every_kind_of_tensor_arrives() -> None:
    """Any dtype and layout arrives equal: strided, complex, conjugated, boolean, integer, empty, without dims."""
    values = tensors()
    if dist.get_rank() == 0:
        operations = make_handler(0, {}, described(values)).create_send_ops(values)
        assert not any(op.tensor.is_conj() or op.tensor.is_neg() for op in operations)
        assert all(op.tensor.is_contiguous() for op in operations)
        run(operations)
        return
    handler = make_handler(1, described(values), {})
    run(handler.create_receive_ops(0))
    received = handler.get_inputs(0)
    assert list(received) == sorted(values)
    for key, value in values.items():
        assert received[key].dtype == value.dtype, key
        assert same_bits(received[key], value), key
    assert received["images"].is_contiguous(memory_format=torch.channels_last)
    assert received["transposed"].stride() == values["transposed"].stride()


@distributed(ranks=2)
def test_the_wire_order_is_the_order_of_names() -> None:
    """Both ends sort by name, in whatever order they were given, so tensors of one shape are not confused."""
    values = {"b": torch.full((2,), 2.0), "a": torch.full((2,), 1.0), "c": torch.full((2,), 3.0)}
    if dist.get_rank() == 0:
        shuffled = {key: values[key] for key in ("c", "a", "b")}
        operations = make_handler(0, {}, shuffled).create_send_ops(values)
        assert [float(op.tensor[0]) for op in operations] == [1.0, 2.0, 3.0]
        run(operations)
        return
    handler = make_handler(1, values, {})
    assert list(handler.inputs) == ["a", "b", "c"]
    run(handler.create_receive_ops(0))
    assert {key: float(value[0]) for key, value in handler.get_inputs(0).items()} == {"a": 1.0, "b": 2.0, "c": 3.0}


@distributed(ranks=2)
def test_microbatches_are_kept_apart() -> None:
    """Several microbatches may be on the way at once."""
    if dist.get_rank() == 0:
        handler = make_handler(0, {}, {"x": torch.empty(2, device="meta")})
        for index in range(3):
            run(handler.create_send_ops({"x": torch.full((2,), float(index))}))
        return
    handler = make_handler(1, {"x": torch.empty(2, device="meta")}, {})
    run([operation for index in range(3) for operation in handler.create_receive_ops(index)])
    assert handler.waiting_microbatches == (0, 1, 2)
    assert [float(handler.get_inputs(index)["x"][0]) for index in (2, 0, 1)] == [2.0, 0.0, 1.0]
    assert handler.waiting_microbatches == ()


@distributed(ranks=2)
def test_ranks_are_those_of_the_group() -> None:
    """A stage's rank counts within the pipeline group, whatever its global rank is."""
    group = dist.new_group([1, 0], sort_ranks=False)
    value = {"x": torch.arange(3.0)}
    if dist.get_group_rank(group, dist.get_rank()) == 0:
        run(make_handler(0, {}, value, group=group).create_send_ops(value))
        assert dist.get_rank() == 1
        return
    handler = make_handler(1, value, {}, group=group)
    run(handler.create_receive_ops(0))
    assert torch.equal(handler.get_inputs(0)["x"], value["x"])


@distributed(ranks=2)
def test_extra_outputs_are_ignored() -> None:
    """Only what the next stage expects is sent."""
    if dist.get_rank() == 0:
        handler = make_handler(0, {}, {"x": torch.empty(2, device="meta")})
        run(handler.create_send_ops({"aux": torch.ones(9), "x": torch.ones(2)}))
        return
    handler = make_handler(1, {"x": torch.empty(2, device="meta")}, {})
    run(handler.create_receive_ops(0))
    assert list(handler.get_inputs(0)) == ["x"]


@distributed(ranks=2)
def test_a_sent_tensor_may_require_a_gradient() -> None:
    """An output in a graph is sent without it, and stays in it."""
    if dist.get_rank() == 0:
        output = torch.ones(2, requires_grad=True) * 3
        (operation,) = make_handler(0, {}, {"x": output}).create_send_ops({"x": output})
        assert not operation.tensor.requires_grad
        assert output.grad_fn is not None
        run([operation])
        return
    handler = make_handler(1, {"x": torch.empty(2, device="meta")}, {})
    run(handler.create_receive_ops(0))
    assert handler.get_inputs(0)["x"].tolist() == [3.0, 3.0]


@distributed(ranks=2)
def test_a_tensor_that_does_not_fit_is_stopped_on_the_sender() -> None:
    """A wrong dtype or shape is an error that names both, before anything leaves, and the group stays usable."""
    if dist.get_rank() == 0:
        handler = make_handler(0, {}, {"x": torch.empty(2, 3, device="meta")})
        with pytest.raises(
            PipelineTransferError, match=r"'x' for stage 1 has dtype torch.bfloat16, expected torch.float32"
        ):
            handler.create_send_ops({"x": torch.ones(2, 3, dtype=torch.bfloat16)})
        with pytest.raises(PipelineTransferError, match=r"has shape \(3, 2\), expected \(2, 3\)"):
            handler.create_send_ops({"x": torch.ones(3, 2)})
        with pytest.raises(KeyError, match=r"stage 1 expects \['x'\], but stage 0 gave \['y'\]; missing: \['x'\]"):
            handler.create_send_ops({"y": torch.ones(2, 3)})
        run(handler.create_send_ops({"x": torch.ones(2, 3)}))
        return
    handler = make_handler(1, {"x": torch.empty(2, 3, device="meta")}, {})
    run(handler.create_receive_ops(0))
    assert torch.equal(handler.get_inputs(0)["x"], torch.ones(2, 3))


# ---- buffers


@distributed(ranks=2)
def test_buffers_live_from_receive_to_use() -> None:
    """A buffer is allocated when its receive is built, and freed when its taker lets go of it."""
    if dist.get_rank() == 0:
        run(make_handler(0, {}, {"x": torch.empty(2)}).create_send_ops({"x": torch.ones(2)}))
        return
    handler = make_handler(1, {"x": torch.empty(2)}, {})
    assert handler.waiting_microbatches == ()
    run(handler.create_receive_ops(1))
    assert handler.waiting_microbatches == (1,)
    received = handler.get_inputs(1)
    buffer = weakref.ref(received["x"])
    del received
    gc.collect()
    assert buffer() is None
    with pytest.raises(KeyError, match=r"\['x'\] of microbatch 1 are not there; they can be taken once"):
        handler.get_inputs(1)


@distributed(ranks=2)
def test_inputs_end_on_the_device_of_the_stage() -> None:
    """Over gloo, tensors travel on the CPU and end on the stage's device, but for values that belong elsewhere."""
    host = ValueSpec((2,), (1,), torch.float32, device="cpu", requires_grad=False)
    inputs = {"host": host, "x": torch.empty(2, device="meta")}
    if dist.get_rank() == 0:
        run(make_handler(0, {}, inputs, device="cpu").create_send_ops({"host": torch.ones(2), "x": torch.ones(2)}))
        return
    handler = make_handler(1, inputs, {}, device="meta")
    operations = handler.create_receive_ops(0)
    assert [operation.tensor.device.type for operation in operations] == ["cpu", "cpu"]
    run(operations)
    received = handler.get_inputs(0)
    assert (received["host"].device.type, received["x"].device.type) == ("cpu", "meta")
    assert received["host"].tolist() == [1.0, 1.0]


@distributed(ranks=2)
def test_a_microbatch_is_received_once_and_reset_forgets_it() -> None:
    """A second receive of a microbatch is refused until it was taken or the handler was reset."""
    handler = make_handler(
        1, {"x": torch.empty(2)}, {}, stage_idx_to_host_rank={0: 1 - dist.get_rank(), 1: dist.get_rank()}
    )
    handler.create_receive_ops(0)
    with pytest.raises(PipelineTransferError, match="microbatch 0 is received twice"):
        handler.create_receive_ops(0)
    handler.reset()
    assert handler.waiting_microbatches == ()
    assert len(handler.create_receive_ops(0)) == 1


@distributed(ranks=2)
def test_a_stage_of_the_same_rank_is_not_sent_to() -> None:
    """Building an operation to oneself is an error that names the other way, since it could never finish."""
    handler = make_handler(
        0, {}, {"x": torch.empty(2)}, stage_idx_to_host_rank={0: dist.get_rank(), 1: dist.get_rank()}
    )
    with pytest.raises(PipelineTransferError, match="set_inputs_local"):
        handler.create_send_ops({"x": torch.ones(2)})
    handler = make_handler(
        1, {"x": torch.empty(2)}, {}, stage_idx_to_host_rank={0: dist.get_rank(), 1: dist.get_rank()}
    )
    with pytest.raises(PipelineTransferError, match="set_inputs_local"):
        handler.create_receive_ops(0)
    assert handler.waiting_microbatches == ()


# ---- hand-over on one rank; no process is needed


def test_a_local_hand_over_aliases_without_history() -> None:
    """What another stage of this rank hands over is the same memory in a new graph."""
    handler = make_handler(1, {"x": torch.empty(2, requires_grad=True)}, {})
    produced = torch.ones(2, requires_grad=True) * 2
    handler.set_inputs_local({"x": produced}, 0)
    taken = handler.get_inputs(0)["x"]
    assert taken.is_leaf
    assert taken.requires_grad
    assert taken.data_ptr() == produced.data_ptr()


@pytest.mark.parametrize("switch", [None, True, False])
def test_only_float_and_complex_inputs_require_a_gradient(switch: bool | None) -> None:
    """The switch holds for float and complex inputs; without it each follows its description; integers never do."""
    spec = ValueSpec((2,), (1,), torch.float32, device="cpu", requires_grad=True)
    inputs = {
        "complex": torch.zeros(2, dtype=torch.complex64),
        "float": torch.zeros(2),
        "int": torch.zeros(2, dtype=torch.long),
        "mask": torch.zeros(2, dtype=torch.bool),
        "value": spec,
    }
    handler = make_handler(1, inputs, {})
    if switch is not None:
        handler.set_input_requires_grad_(switch)
    handed = {key: torch.zeros(2, dtype=value.dtype) for key, value in inputs.items()}
    handler.set_inputs_local(handed, 2)
    requiring = {key for key, value in handler.get_inputs(2).items() if value.requires_grad}
    assert requiring == {None: {"value"}, True: {"complex", "float", "value"}, False: set()}[switch]


def test_inputs_may_be_handed_over_in_parts_but_are_taken_whole() -> None:
    """A missing input is named, and what is there stays."""
    handler = make_handler(1, {"x": torch.empty(2), "y": torch.empty(2)}, {})
    handler.set_inputs_local({"x": torch.ones(2)}, 0)
    with pytest.raises(KeyError, match=r"inputs \['y'\] of microbatch 0 are not there"):
        handler.get_inputs(0)
    handler.set_inputs_local({"y": torch.ones(2)}, 0)
    assert set(handler.get_inputs(0)) == {"x", "y"}


def test_a_local_hand_over_is_checked() -> None:
    """An unknown name is a KeyError that names both sides, and a wrong dtype or shape is refused."""
    handler = make_handler(1, {"x": torch.empty(2)}, {})
    with pytest.raises(KeyError, match=r"handed \['z'\], but stage 1 expects \['x'\]; unknown: \['z'\]"):
        handler.set_inputs_local({"z": torch.ones(2)}, 0)
    with pytest.raises(PipelineTransferError, match=r"dtype torch.int64, expected torch.float32"):
        handler.set_inputs_local({"x": torch.ones(2, dtype=torch.long)}, 0)
    with pytest.raises(PipelineTransferError, match=r"shape \(3,\), expected \(2,\)"):
        handler.set_inputs_local({"x": torch.ones(3)}, 0)


def test_where_the_pipeline_starts_nothing_is_received() -> None:
    """A stage without a predecessor builds no receive, and taking or handing over its inputs is a RuntimeError."""
    handler = make_handler(0, {"x": torch.empty(2)}, {})
    assert handler.create_receive_ops(0) == []
    with pytest.raises(RuntimeError, match="taken from the batch"):
        handler.get_inputs(0)
    with pytest.raises(RuntimeError, match="cannot be handed over"):
        handler.set_inputs_local({"x": torch.ones(2)}, 0)


def test_where_the_pipeline_ends_nothing_is_sent() -> None:
    """A stage without a successor builds no send, whatever it computed."""
    assert make_handler(1, {}, {"x": torch.empty(2)}).create_send_ops({"y": torch.ones(5)}) == []


def test_the_edges_are_described() -> None:
    """Each input and output says where it comes from or goes to, under a name that tells the way."""
    first = make_handler(0, {"ids": torch.empty(2)}, {"x": torch.empty(2)})
    assert first.inputs["ids"] == StartStageInput("ids")
    output = first.outputs["x"]
    assert isinstance(output, SendStageOutput)
    assert output.to_stage == 1
    last = make_handler(1, {"x": torch.empty(2)}, {"loss": torch.empty(())})
    received = last.inputs["x"]
    assert isinstance(received, ReceiveStageInput)
    assert (received.name, received.from_stage) == ("fwd_recv_from_0_to_1[x]", 0)
    assert last.outputs["loss"] == EndStageOutput()


@pytest.mark.parametrize("index", [-1, 3])
def test_an_unknown_microbatch_is_refused(index: int) -> None:
    """A microbatch that does not exist is named, with those that do."""
    handler = make_handler(1, {"x": torch.empty(2)}, {})
    for call in (handler.create_receive_ops, handler.get_inputs, lambda i: handler.set_inputs_local({}, i)):
        with pytest.raises(PipelineTransferError, match=f"microbatch {index} does not exist; expected 0 to 2"):
            call(index)


def test_bad_construction_is_refused() -> None:
    """No microbatches, or a neighbour without a rank, are refused before anything is sent."""
    with pytest.raises(PipelineTransferError, match="num_microbatches is 0"):
        make_handler(0, {}, {}, num_microbatches=0)
    with pytest.raises(PipelineTransferError, match=r"stage 1 has no rank; known stages are \[0\]"):
        make_handler(0, {}, {}, stage_idx_to_host_rank={0: 0})
