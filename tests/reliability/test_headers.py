"""Messages say what they are before a receiver uses them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from benchmarks.faults.job import train
from benchmarks.faults.ranks import run_ranks
from d9d_lightning.errors import MessageMismatchError
from d9d_lightning.runtime import transport
from d9d_lightning.runtime.communication import StageCommunicationHandler
from d9d_lightning.runtime.headers import HEADER_BYTES, MessageHeader
from d9d_lightning.runtime.transport import ProcessTransport

MICROBATCHES = 4


class Recast:
    """Sends another tensor than was agreed on, behind the back of the sender's own check."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.original = StageCommunicationHandler.create_sends

    def __call__(self, handler: Any, outputs: Any) -> Any:
        wires = self.original(handler, outputs)
        (name,) = [name for name in handler.outputs if name != "~none"]
        if self.kind == "larger":
            outputs[name] = torch.cat([outputs[name], outputs[name]])
        elif self.kind == "smaller":
            outputs[name] = outputs[name][:1].contiguous()
        else:
            outputs[name] = outputs[name].double() if self.kind == "dtype" else outputs[name].T.contiguous()
        return [(outputs[name].detach(), wires[0][1]), *wires[1:]]


class LateSender:
    """Sends one microbatch after the next one."""

    def __init__(self, late: int) -> None:
        self.late = late
        self.kept: Any = None
        self.original = ProcessTransport.send_forward

    def __call__(self, sender: Any, stage: int, microbatch: int, values: Any) -> None:
        if microbatch == self.late:
            self.kept = values
            return
        self.original(sender, stage, microbatch, values)
        if microbatch == self.late + 1:
            self.original(sender, stage, self.late, self.kept)


def send_wrong(kind: str, every: bool) -> None:
    """Train with gpipe; the process of stage 0 sends something else than the plan says."""
    os.environ["D9D_DEBUG"] = str(int(every))
    if os.environ["RANK"] == "1":  # the loss owner is rank 0, so rank 1 has stage 0
        if kind == "order":
            late = LateSender(2 if every else 0)
            ProcessTransport.send_forward = lambda *args: late(*args)  # type: ignore[method-assign]
        else:
            recast = Recast(kind)
            transport.StageCommunicationHandler.create_sends = lambda *args: recast(*args)  # type: ignore[method-assign]
    train(schedule="gpipe", batches=2)


WRONG = [
    ("larger", False, "(4, 8) on cpu, 128 bytes"),
    ("order", True, "message 2, values of microbatch 3 for stage 1"),
    pytest.param("smaller", False, "(1, 8) on cpu, 32 bytes", marks=pytest.mark.full),
    pytest.param("dtype", False, "float64 (2, 8) on cpu, 128 bytes", marks=pytest.mark.full),
    pytest.param("turned", False, "(8, 2) on cpu, 64 bytes", marks=pytest.mark.full),
    pytest.param("order", False, "message 0, values of microbatch 1 for stage 1", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("kind", "every", "came"), WRONG)
def test_another_message_than_the_expected_one_is_refused_by_its_header(kind: str, every: bool, came: str) -> None:
    """The receiver ends with an error that names both ranks, the action, what it expected and what came."""
    endings = run_ranks(send_wrong, 2, kind, every)
    assert all(ending.exit_code == 1 for ending in endings), [ending.text for ending in endings]
    for text in (ending.text for ending in endings):
        microbatch = 2 if every else 0
        assert f"rank 0 got another message from rank 1 than it expects for action 1F{microbatch}" in text, text
        assert f"Expected: message {microbatch}, values of microbatch {microbatch} for stage 1" in text
        came_text = text.partition("Came: ")[2]
        assert came in came_text.partition("Both ranks")[0], text
    assert "rank 0 failed first in 1F" in endings[1].text


def train_with_debug(every: bool) -> tuple[list[float], int]:
    """Losses of a job, and the number of headers that were read in it."""
    os.environ["D9D_DEBUG"] = str(int(every))
    read = []
    check = MessageHeader.check
    MessageHeader.check = lambda *args: read.append(check(*args))  # type: ignore[method-assign]
    return train(schedule="zbv", batches=3), len(read)


def test_every_message_has_a_header_in_debug_mode_and_the_first_of_a_signature_always() -> None:
    """With ``D9D_DEBUG=1`` every message is checked, without it the first of each edge, and the losses are the same."""
    from d9d_lightning.testing import run_distributed

    (plain, first), (_, also_first) = run_distributed(train_with_debug, 2, (False,), init_group=False, fresh=True)
    (debug, all_of_them), _ = run_distributed(train_with_debug, 2, (True,), init_group=False, fresh=True)
    assert plain == debug
    # two of the three borders of zbv on two ranks are between ranks; each has one direction per rank and pass
    assert first + also_first == 4
    assert all_of_them == 2 * 3 * MICROBATCHES


def test_a_long_header_is_compared_as_a_whole() -> None:
    """A difference that has no room in the header any more is still found."""
    lines = tuple(f"a.very.long.name.of.a.unit.{index} float32 (4, 8) on cpu, 128 bytes" for index in range(100))
    header = MessageHeader(0, "values", 1, 0, lines)
    other = MessageHeader(0, "values", 1, 0, (*lines[:-1], "another"))
    assert header.to_tensor().numel() == HEADER_BYTES < len(str(header))
    header.check(header.to_tensor(), "rank 0", "rank 1")
    with pytest.raises(MessageMismatchError, match="rank 1 got another message from rank 0"):
        header.check(other.to_tensor(), "rank 0", "rank 1")
