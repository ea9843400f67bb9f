"""Every schedule, size and number of microbatches trains every module as one device does."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch

from tests import parity_modules, parity_transformers
from tests.parity import StepModule, Trained, adamw, assert_same_outcome, sgd, train_pipeline, train_plain
from tests.parity_modules import SAME_MICROBATCHES, SIZE_ONE, Case

CASES: dict[str, Case] = {**parity_modules.CASES, **parity_transformers.CASES}
SCHEDULES = ("gpipe", "1f1b", "zbv")
SIZES = (1, 2, 4)
COUNTS = (1, 3, 4, 8)
OPTIMIZERS = {"sgd": sgd, "adamw": adamw}
STEPS = 3

Combination = tuple[str, str, int, int, str]
"""Module, schedule, pipeline size, number of microbatches, optimizer."""


def chosen_combinations() -> list[Combination]:
    """Four combinations for each module, so that any two values of different factors meet somewhere."""
    chosen = []
    for row, name in enumerate(CASES):
        for column, count in enumerate(COUNTS):
            schedule = SCHEDULES[(row + column) % 3]
            size = SIZES[(row // 3 + 2 * column) % 3]
            chosen.append((name, schedule, size, count, list(OPTIMIZERS)[(row // 2 + column // 2) % 2]))
    return chosen


ALL = list(itertools.product(CASES, SCHEDULES, SIZES, COUNTS, OPTIMIZERS))
CHOSEN = chosen_combinations()


def build(name: str) -> tuple[StepModule, list[object]]:
    """The module of a case, and its batches."""
    torch.manual_seed(0)
    return CASES[name].make(), [CASES[name].batch(index) for index in range(STEPS)]


@cache
def reference(name: str, count: int, optimizer: str) -> Trained:
    """What a module must equal; ``count`` matters where its case says so."""
    module, batches = build(name)
    if CASES[name].reference == SIZE_ONE:
        return train_pipeline(module, batches, count, schedule="gpipe", ranks=1, make_optimizer=OPTIMIZERS[optimizer])
    return train_plain(module, batches, count, OPTIMIZERS[optimizer])


def assert_parity(combination: Combination) -> None:
    """Train both ways; compare the loss of each batch, every parameter and every buffer."""
    name, schedule, size, count, optimizer = combination
    per_microbatch = CASES[name].reference in (SAME_MICROBATCHES, SIZE_ONE)
    expected = reference(name, count if per_microbatch else 1, optimizer)
    module, batches = build(name)
    got = train_pipeline(module, batches, count, schedule=schedule, ranks=size, make_optimizer=OPTIMIZERS[optimizer])
    assert_same_outcome(module, expected, got, unseen=CASES[name].key_bias)
    for step, (ours, whole) in enumerate(zip(got.losses, expected.losses, strict=True)):
        assert batch_mean(ours) == pytest.approx(batch_mean(whole), rel=1e-5), f"loss of step {step}"


def batch_mean(losses: list[float]) -> float:
    """Mean over the samples of a batch of 8, cut as evenly as it can be."""
    sizes = [len(part) for part in torch.tensor_split(torch.arange(8), len(losses))]
    return sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / 8


def test_the_chosen_combinations_hold_every_pair() -> None:
    """Any value of one factor meets any value of any other factor in the default suite."""
    for one, other in itertools.combinations(range(5), 2):
        pairs = {(combination[one], combination[other]) for combination in CHOSEN}
        assert pairs == {(combination[one], combination[other]) for combination in ALL}


@pytest.mark.parametrize("combination", CHOSEN, ids=lambda c: "-".join(map(str, c)))
def test_training_equals_one_device(combination: Combination) -> None:
    """A module, schedule, size, number of microbatches and optimizer give the parameters that one device gives."""
    assert_parity(combination)


@pytest.mark.full
@pytest.mark.parametrize("combination", sorted(set(ALL) - set(CHOSEN)), ids=lambda c: "-".join(map(str, c)))
def test_training_equals_one_device_everywhere(combination: Combination) -> None:
    """No combination of module, schedule, size, number of microbatches and optimizer differs from one device."""
    assert_parity(combination)
