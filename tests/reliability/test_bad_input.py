"""Random bad input gets an error of ours that says what to do, never a bare traceback from inside."""

from __future__ import annotations

import inspect
import random
from datetime import timedelta
from typing import Any

import pytest
import torch

from d9d_lightning import D9DStrategy
from d9d_lightning.errors import PipelineConfigurationError, ScheduleError
from d9d_lightning.schedule import SCHEDULES, Program, build_program, check_program

ARGUMENTS = sorted(set(inspect.signature(D9DStrategy.__init__).parameters) - {"self"})
FREE = {"batch_spec", "example_batch"}
"""Arguments that may be anything until a batch is there."""


class Odd:
    """An object whose own methods fail."""

    def __eq__(self, other: object) -> bool:
        raise ArithmeticError("cannot be compared")

    def __hash__(self) -> int:
        raise ArithmeticError("cannot be hashed")

    def __repr__(self) -> str:
        return "<odd>"


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, -1, 3.5, -0.0, float("nan"), float("inf"), 10**30, "", "zbv", "ZBV", "auto", "gloo"),
    *("float32", b"zbv", (), [], {}, set(), ["net.*"], [None], ["a", 3], {"a": 1}, object(), Odd(), [Odd()], int),
    *(torch.float32, torch.ones(2), torch.ones(()), timedelta(0), timedelta(seconds=5), lambda: None, iter(["a"])),
)


def try_arguments(given: dict[str, Any]) -> None:
    """Build the strategy; a refusal must name an argument that was given, and what to type."""
    try:
        D9DStrategy(**given)
    except PipelineConfigurationError as error:
        assert any(name in str(error) for name in given), error
        assert "Type " in str(error), error


@pytest.mark.parametrize("name", ARGUMENTS)
def test_no_value_of_an_argument_ends_in_a_traceback_from_inside(name: str) -> None:
    """Every kind of value is either taken or refused with the argument's name and a line to type."""
    for value in VALUES:
        try_arguments({name: value})


def test_no_mixture_of_arguments_ends_in_a_traceback_from_inside() -> None:
    """Two hundred random sets of arguments, most of them wrong, are taken or refused in our own words."""
    generator = random.Random(0)
    for _ in range(200):
        names = generator.sample(ARGUMENTS, generator.randint(1, 5))
        try_arguments({name: generator.choice(VALUES) for name in names})


def mangle(text: str, generator: random.Random) -> str:
    """The text of a program with a few random edits."""
    for _ in range(generator.randint(1, 4)):
        place = generator.randrange(len(text) + 1)
        other = generator.choice(
            ["", "0", "9", "F", "W", " ", "\n", ":", "-1", ";", "(", ",", "=", "\x00", "é", "99999"]
        )
        cut = generator.choice([0, 1, 1, 2, 8])
        text = text[:place] + other + text[place + cut :]
    return text


def try_program(text: str) -> bool:
    """Parse and check a program; whether it is a legal one. Anything but a schedule error passes through."""
    try:
        check_program(Program.parse(text))
    except ScheduleError as error:
        assert str(error), "an error without words"
        return False
    return True


@pytest.mark.parametrize("schedule", ["zbv", "1f1b", "dualpipev"])
def test_no_program_text_ends_in_a_traceback_from_inside(schedule: str) -> None:
    """A mangled program is read and found legal, or refused with a schedule error that says something."""
    generator = random.Random(1)
    text = build_program(schedule, pp_size=2, num_microbatches=4).text()
    assert try_program(text)
    legal = sum(try_program(mangle(text, generator)) for _ in range(400))
    assert legal < 400


def test_no_schedule_cell_ends_in_a_traceback_from_inside() -> None:
    """A mangled CSV is read, or refused with a schedule error."""
    generator = random.Random(2)
    text = build_program("zbv", pp_size=2, num_microbatches=3).to_csv()
    for _ in range(300):
        mangled = "\n" + mangle(text, generator)
        try:
            Program.from_csv(mangled)
        except ScheduleError as error:
            assert str(error)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-2, 3), (2, -1), (True, 2), (2.0, 4), ("2", 4), (None, None)])
def test_no_size_of_a_schedule_ends_in_a_traceback_from_inside(name: str, sizes: tuple[Any, Any]) -> None:
    """A size that is no positive whole number is refused with a schedule error that shows it."""
    try:
        build_program(name, pp_size=sizes[0], num_microbatches=sizes[1])
    except ScheduleError as error:
        assert any(repr(size) in str(error) for size in sizes), error
    else:
        assert sizes == (True, 2), sizes
