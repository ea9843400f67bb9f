"""Any legal program, under any delays, ends and gives the gradients of one device."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from d9d_lightning.schedule import check_program
from tests.parity import microbatches_of
from tests.reliability.random_programs import Crossing, DelayedPipeline, draw_program


def run_random_program(seed: int) -> None:
    """Draw a program and delays, run them, and compare every gradient."""
    generator = random.Random(seed)
    program = draw_program(generator)
    check_program(program)
    torch.manual_seed(seed)
    expected = Crossing()
    module = copy.deepcopy(expected)
    batch = (torch.randint(0, 7, (8, 3)), torch.randint(0, 7, (8, 3)))
    pieces = microbatches_of(batch, program.num_microbatches)
    expected.training_step(batch, 0).backward()
    run = DelayedPipeline(module, generator).run(
        lambda piece: module.training_step(*piece.args),
        pieces,
        program,
        lambda piece, loss: loss * (piece.size / 8),
    )
    for (name, ours), theirs in zip(module.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=1e-5, atol=1e-6, msg=f"seed {seed}: {name}\n{program.text()}"
        )
    assert all(stage.is_clean for stage in run.stages)


@pytest.mark.parametrize("block", [0, *[pytest.param(n, marks=pytest.mark.full) for n in range(1, 34)]])
def test_random_programs_under_random_delays_give_the_gradients_of_one_device(block: int) -> None:
    """Thirty random legal programs, each with its own delays, neither deadlock nor lose a gradient."""
    for seed in range(30 * block, 30 * block + 30):
        run_random_program(seed)
