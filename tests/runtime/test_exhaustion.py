"""When memory runs out, the error says where it was and what the rank held."""

from __future__ import annotations

import re

import pytest
import torch
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor, nn

from d9d_lightning.runtime.exhaustion import is_exhaustion
from d9d_lightning.runtime.pipeline import Pipeline
from d9d_lightning.schedule import build_program
from d9d_lightning.stage.memory import saved_bytes
from d9d_lightning.values import Microbatch

WIDTH = 256
ROWS = 1024
CPU_MESSAGE = "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
    RuntimeError(CPU_MESSAGE),
    MemoryError(),
]


class Greedy(nn.Module):
    """Raises in one of its calls with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.raises: BaseException | None = None
        self.calls_left = 10**9

    def forward(self, x: Tensor) -> Tensor:
        self.calls_left -= 1
        if self.raises is not None and self.calls_left < 0:
            raise self.raises
        return self.linear(x).tanh()


def run_out(error: Exception, momentum: bool = False) -> str:
    """What a user reads after the second microbatch of the second stage."""
    net = nn.Sequential(*(Greedy() for _ in range(4)))
    program = build_program("zbv", pp_size=1, num_microbatches=4)
    pipeline = Pipeline(net, stage_to_rank=program.stage_to_rank, rank=0, size=1)
    pieces = [Microbatch(index, ROWS, (torch.randn(ROWS, WIDTH),)) for index in range(4)]

    def step(piece: Microbatch) -> Tensor:
        return net(piece.args[0]).sum()

    pipeline.place(step, pieces)
    pipeline.release()
    pipeline.run(step, pieces, program, finish=lambda piece, loss: loss)
    if momentum:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9)
        optimizer.step()
        pipeline.optimizer_states = lambda: [state["momentum_buffer"] for state in optimizer.state.values()]
    net[3].raises, net[3].calls_left = error, 1
    with pytest.raises(type(error)) as raised:
        pipeline.run(step, pieces, program, finish=lambda piece, loss: loss)
    assert raised.value is error
    return str(error)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_the_message_says_where_it_was_and_what_was_held(error: Exception) -> None:
    """The error keeps its type and first line, and names action, unit, parameters, gradients and activations."""
    first = str(error)
    text = run_out(error)
    assert text.startswith(first)
    assert re.search(r"Memory ran out in action 1F1, unit 3\.", text)
    assert "1.0 MB of parameters; 1.0 MB of gradients; no optimizer states yet" in text
    # each of the two layers of stage 0 keeps its output, the first one its input too
    assert "stage 0: microbatch 1 3.0 MB of activations" in text
    assert "activation_checkpointing=" in text
    assert is_oom_error(error) == (not isinstance(error, MemoryError))


def test_optimizer_states_are_counted() -> None:
    """After a step with momentum the error names the optimizer states, as large as the parameters."""
    text = run_out(torch.OutOfMemoryError("CUDA out of memory."), momentum=True)
    assert "1.0 MB of parameters; 1.0 MB of gradients; 1.0 MB of optimizer states; stage 0" in text


def test_other_errors_are_left_alone() -> None:
    """Only errors about memory are taken for one."""
    assert not is_exhaustion(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_exhaustion(ValueError("out of memory"))


def test_what_a_graph_saves_is_counted_once() -> None:
    """Outputs shared by two operations count once, parameters do not count, and custom functions are looked into."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, x * 2)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    x = torch.randn(4, 8, requires_grad=True)
    hidden = nn.Linear(8, 8)(x)
    assert saved_bytes([hidden]) == 2 * 4 * 8 * 4
    assert saved_bytes([hidden.tanh()]) == 2 * 4 * 8 * 4
    assert saved_bytes([Doubled.apply(x)]) == 3 * 4 * 8 * 4
