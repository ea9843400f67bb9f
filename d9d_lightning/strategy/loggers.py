"""What a step writes to its loggers by hand is written once, by the run of the step that is kept.

A step runs more often than there are batches: traces look at it, and every stage replays it. The log book looks after
``self.log``, this file after ``self.logger.experiment.add_scalar(...)`` and ``self.logger.log_metrics(...)``. While a
step runs, the trainer's loggers are stand-ins, whose calls go through one method. That method is a sink of the step,
like ``log``: the plan brings what it is given to the loss owner, and only there it does anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer

from d9d_lightning.partition.placeholder import is_placeholder

__all__ = ["OUTLET", "loggers_routed"]

_READS = ("get", "is_")
"""What methods begin with that only give something back."""


class Outlet:
    """Does what a logger was asked to do; the run of a step takes its method over."""

    def write(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of a logger."""
        return method(*args, **kwargs)


OUTLET = Outlet()


class _StandIn:
    """A logger, or something that it gives out to write to; everything but a call is answered by the original."""

    def __init__(self, target: Any) -> None:
        object.__setattr__(self, "_target", target)

    @property
    def __class__(self) -> type:
        # for isinstance(self.logger, TensorBoardLogger)
        return type(self._target)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        self._target.__class__ = kind

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if name == "experiment":
            return _StandIn(found)
        if not callable(found) or name.startswith(_READS):
            return found
        return lambda *args, **kwargs: _write(found, args, kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._target, name, value)

    def __getitem__(self, key: Any) -> Any:
        return _StandIn(self._target[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        _write(self._target.__setitem__, (key, value), {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _write(self._target, args, kwargs)


def _write(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = OUTLET.write(method, args, kwargs)
    return None if is_placeholder(result) else result


@contextmanager
def loggers_routed(trainer: Trainer) -> Iterator[None]:
    """Put stand-ins in the place of the trainer's loggers while a step is traced or runs."""
    before = trainer.loggers
    if not before:
        yield
        return
    stand_ins: list[Any] = [_StandIn(logger) for logger in before]
    trainer.loggers = stand_ins
    try:
        yield
    finally:
        trainer.loggers = before
