"""A failing or hanging rank tells where it is, from frames alone."""

from __future__ import annotations

import threading

import torch
from torch import nn

from d9d_lightning.runtime.whereabouts import Doing, Outside, place_of_failure
from d9d_lightning.schedule import build_program
from d9d_lightning.testing.pipeline import LocalPipeline
from tests.parity import microbatches_of
from tests.parity_basics import Residual, pairs


class Waits(nn.Module):
    """Stands still, or raises, in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.armed = False
        self.arrived, self.go_on = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.armed:
            self.arrived.set()
            self.go_on.wait(30.0)
            raise ZeroDivisionError("by design")
        out: torch.Tensor = self.linear(x)
        return out


def test_the_unit_under_way_is_read_from_another_thread_and_from_the_traceback() -> None:
    """While a unit stands still its name shows beside the action, and the error that it raises leads back to it."""
    module = Residual()
    module.blocks[3] = waits = Waits()
    pipeline = LocalPipeline(module)
    program = build_program("1f1b", pp_size=2, num_microbatches=2)
    pieces = microbatches_of(pairs(0), 2)
    caught: list[BaseException] = []

    def run() -> None:
        try:
            pipeline.run(lambda piece: module.training_step(*piece.args), pieces, program, lambda piece, loss: loss)
        except ZeroDivisionError as error:
            caught.append(error)

    run()
    assert not caught
    waits.armed = True
    thread = threading.Thread(target=run)
    thread.start()
    assert waits.arrived.wait(30.0)
    assert str(Doing("0F0", thread.ident or 0)) == "0F0, unit blocks.3"
    assert "in forward" in str(Outside(thread.ident or 0)) and __file__ in str(Outside(thread.ident or 0))
    waits.go_on.set()
    thread.join()
    assert place_of_failure("0F0", caught[0]) == "0F0, unit blocks.3"


def test_a_thread_that_is_gone_is_only_outside() -> None:
    """Nothing is made up for a thread that does not run any more."""
    assert str(Outside(0)) == "outside of any action"
    assert str(Doing("1B2", 0)) == "1B2"
