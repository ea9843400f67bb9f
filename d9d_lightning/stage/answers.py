"""What a stage answers to calls of other stages' units, in a replay and when a checkpointed region runs again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from d9d_lightning.errors import UnplannedCallError
from d9d_lightning.partition.differentiation import Output
from d9d_lightning.partition.interception import Interceptor
from d9d_lightning.partition.placeholder import Placeholder
from d9d_lightning.partition.shapes import Geometry
from d9d_lightning.partition.snapshot import RandomState
from d9d_lightning.stage.randomness import set_position
from d9d_lightning.stage.script import CallEntry, StageScript, describe_call
from d9d_lightning.values import ValueId

__all__ = ["SCALAR", "Answers"]

SCALAR = Geometry((), (), 0, torch.float32, torch.device("cpu"))
"""Geometry of what a metric or a log answers on a stage that does not finish the step."""


class Answers:
    """Answers to the skipped calls of one replay; keeps no graph alive, as the graph of a checkpointed region keeps it.

    Args:
        interceptor: Catches the calls.
        script: What the stage does at each call.
        seed: Position of the microbatch in the random-number rule.
        received: The values that the stage receives, as leaves.
    """

    def __init__(
        self,
        interceptor: Interceptor,
        script: StageScript,
        seed: tuple[int, ...],
        received: Mapping[ValueId, torch.Tensor],
    ) -> None:
        self._interceptor = interceptor
        self._script = script
        self._seed = seed
        self._received = received
        self._handed = self._hand_over()

    def _hand_over(self) -> dict[ValueId, torch.Tensor]:
        # glue may change a value in place, which a leaf forbids, and neither a relay nor a second run must see
        overwritten = self._script.plan.trace.overwritten
        return {value: t.clone() if value in overwritten else t for value, t in self._received.items()}

    def skip(
        self,
        entry: CallEntry,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        undo: list[Callable[[], None]],
    ) -> Any:
        """What a call of another stage's unit returns here; what it does besides is repeated."""

        def get(leaf: int) -> torch.Tensor:
            value = entry.received.get(leaf)
            return entry.placeholder(leaf) if value is None else self._handed[value]

        result: Any
        if entry.answer is not None:
            result = entry.answer
        elif entry.bare:
            result = get(0)
        else:
            result = entry.effects.apply(module, (args, kwargs), get, undo)
        self.set_position_after(entry)
        return result

    def set_position_after(self, entry: CallEntry) -> None:
        """Random numbers go on from where the call ends, whoever ran it."""
        if entry.draws:
            set_position(entry.draws, self._seed, entry.unit, entry.number)

    def repeat(self, start: int, run: Callable[[], Any]) -> None:
        """Run a region again that began before unit call number ``start``."""
        again = Answers(self._interceptor, self._script, self._seed, self._received)
        policy = _RecomputePolicy(self._interceptor, self._script, again, start)
        random_state = RandomState() if self._script.plan.trace.entry_draws else None
        try:
            with self._interceptor.policy(policy):
                run()
        finally:
            policy.undo_writes()
            if random_state is not None:
                random_state.restore()


class _RecomputePolicy:
    """Answers the calls of a checkpointed region in the backward pass."""

    def __init__(self, interceptor: Interceptor, script: StageScript, answers: Answers, start: int) -> None:
        self._interceptor = interceptor
        self._script = script
        self._answers = answers
        self._index = start
        self._undo: list[Callable[[], None]] = []

    def call(
        self, unit: str, module: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        entry = self._script.entries[self._index] if self._index < len(self._script.entries) else None
        if entry is None or entry.unit != unit:
            raise UnplannedCallError(
                f"a checkpointed region calls unit {unit!r} when it runs again in the backward pass; the first time it "
                "called " + (describe_call(entry) if entry is not None else "no further unit")
            )
        self._index += 1
        if not entry.owned:
            return self._answers.skip(entry, module, args, kwargs, self._undo)
        result = self._interceptor.run_inside(original, args, kwargs)
        self._answers.set_position_after(entry)
        return result

    def differentiates(self, outputs: Sequence[Output]) -> bool:
        return True

    def sink(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._script.is_loss_owner:
            return original(*args, **kwargs)
        return Placeholder(SCALAR, "a metric")

    def undo_writes(self) -> None:
        for restore in reversed(self._undo):
            restore()
