"""Random users: whatever they do to gradients, in whatever order, they get those of one device."""

import contextlib
import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from d9d_lightning.gradients import GradientSynchronizer
from d9d_lightning.testing import run_distributed

SHAPES = [(3,), (2, 5), (4, 1), (7,), ()]
Parameters = list[nn.Parameter]


def drop(parameter: nn.Parameter) -> None:
    parameter.grad = None


def double(parameter: nn.Parameter) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(2)


def replace(parameter: nn.Parameter) -> None:
    # A user who puts new zeros in the place of attached ones asks for zeros, where one device has None.
    if parameter.grad is not None and parameter.grad.any():
        parameter.grad = parameter.grad * 3


def repoint(parameter: nn.Parameter) -> None:
    if parameter.grad is not None and parameter.grad.any():
        parameter.grad.data = parameter.grad.data / 2


def add_one(parameter: nn.Parameter) -> None:
    parameter.grad = torch.ones_like(parameter) if parameter.grad is None else parameter.grad + 1


INTERVENTIONS: list[Callable[[nn.Parameter], None]] = [drop, double, replace, repoint, add_one]


def accumulate(parameters: Parameters, used: list[bool], key: int) -> torch.Tensor:
    """A loss whose gradient is a different number for each use."""
    loss = torch.zeros((), requires_grad=True) * 1
    for index, (parameter, is_used) in enumerate(zip(parameters, used, strict=True)):
        if is_used:
            loss = loss + (parameter * (1 + (key * 7 + index * 3) % 11)).sum()
    return loss


def zero(parameters: Parameters, way: str) -> None:
    for parameter in parameters:
        if way == "none":
            parameter.grad = None
        elif way == "in place" and parameter.grad is not None:
            parameter.grad.zero_()


def run_step(
    dice: random.Random, step: int, mine: Parameters, reference: Parameters, sync: GradientSynchronizer
) -> None:
    """One optimizer step of a random user, on this replica and on the one device that stands for both."""
    accumulations = dice.randint(1, 3)
    counted = dice.random() < 0.5
    sync.set_required_accumulations(1 if counted else None)
    for number in range(accumulations):
        used = [[dice.random() < 0.7 for _ in SHAPES] for _ in range(2)]
        last = number == accumulations - 1
        key = 10 * step + number
        with contextlib.nullcontext() if last else sync.no_sync():
            accumulate(mine, used[dist.get_rank()], key + 100 * dist.get_rank()).backward()
        losses = [accumulate(reference, used[replica], key + 100 * replica) for replica in range(2)]
        (sum(losses) / 2).backward()
        if not last or not counted:
            for _ in range(dice.randint(0, 2)):
                act, index = dice.choice(INTERVENTIONS), dice.randrange(len(SHAPES))
                act(mine[index])
                act(reference[index])
    sync.finish()
    sync.wait()
    for index, (left, right) in enumerate(zip(mine, reference, strict=True)):
        assert (left.grad is None) == (right.grad is None), f"step {step}, parameter {index}"
        if left.grad is not None:
            torch.testing.assert_close(left.grad, right.grad, msg=lambda text, i=index: f"step {step}, {i}: {text}")


def be_random_users(seeds: list[int]) -> None:
    for seed in seeds:
        dice = random.Random(seed)
        mine, reference = ([nn.Parameter(torch.ones(shape)) for shape in SHAPES] for _ in range(2))
        frozen_at_first = dice.randrange(len(SHAPES) + 1)
        for index in range(frozen_at_first, len(SHAPES)):
            mine[index].requires_grad_(False)
            reference[index].requires_grad_(False)
        size = dice.choice([0.0, 0.00001, 25.0])
        sync = GradientSynchronizer([mine[::2], mine[1::2]], size, None)
        sync.bind(mesh=dist.group.WORLD)
        for step in range(6):
            try:
                run_step(dice, step, mine, reference, sync)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error
            way = dice.choice(["none", "in place", "keep", "synchronizer"])
            zero(reference, "none" if way == "synchronizer" else way)
            zero(mine, way)
            if way == "synchronizer":
                sync.zero_grad(set_to_none=dice.random() < 0.5)
            if dice.random() < 0.4:
                index, trains = dice.randrange(len(SHAPES)), dice.random() < 0.6
                mine[index].requires_grad_(trains)
                reference[index].requires_grad_(trains)
        sync.unbind()


def test_random_users_cannot_break_the_average() -> None:
    """20 random users of two replicas get the gradients of one device, None included."""
    run_distributed(be_random_users, 2, (list(range(10, 30)),))


@pytest.mark.full
def test_many_random_users_cannot_break_the_average() -> None:
    """1000 more random users."""
    run_distributed(be_random_users, 2, (list(range(30, 1030)),), timeout=300)
