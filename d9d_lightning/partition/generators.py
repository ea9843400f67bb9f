"""Random generators that a user keeps on a module: torch's, Python's and numpy's, treated alike."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Iterator
from typing import Any

import torch

__all__ = [
    "LentGenerators",
    "equal_states",
    "generator_state",
    "is_generator",
    "numpy_random",
    "set_generator_state",
]


class LentGenerators:
    """Notes which units draw from generators that glue can reach too.

    Attributes:
        generators: Such generators, with the names of the attributes that hold them.
        found: Pairs of a name and a unit.
    """

    def __init__(self) -> None:
        self.generators: list[tuple[str, Any]] = []
        self.found: set[tuple[str, str]] = set()

    @contextlib.contextmanager
    def watching(self, unit: str) -> Iterator[None]:
        """Around one call of a unit."""
        states = [generator_state(generator) for _, generator in self.generators]
        yield
        for (name, generator), state in zip(self.generators, states, strict=True):
            if not equal_states(generator_state(generator), state):
                self.found.add((name, unit))


def numpy_random() -> Any:
    """``numpy.random``, or None without numpy."""
    try:
        import numpy
    except ImportError:  # numpy is optional for torch, so it is for us
        return None
    return numpy.random


def is_generator(value: Any) -> bool:
    """Whether a value is a random generator whose state can be read and set."""
    if isinstance(value, torch.Generator):
        return True
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    if not type(value).__module__.startswith("numpy"):
        return False
    source = numpy_random()
    return source is not None and isinstance(value, source.Generator | source.RandomState)


def generator_state(generator: Any) -> Any:
    """The state of a generator; later draws do not change it."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state()


def set_generator_state(generator: Any, state: Any) -> None:
    """Put a generator into a state of :func:`generator_state`."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def equal_states(one: Any, other: Any) -> bool:
    """Whether two states are the same."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return pickle.dumps(one) == pickle.dumps(other)
