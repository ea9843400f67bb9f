"""What actions cost: time, memory, and what surrounds the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from d9d_lightning.errors import ScheduleError
from d9d_lightning.schedule.actions import ActionBase, ActionKind

__all__ = ["UNIT_COSTS", "Costs", "StageCosts"]

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Costs of the actions of one stage, in any one unit of time. Each is a number, or one per stage.

    Attributes:
        forward: Time of F.
        backward_input: Time of I.
        backward_weight: Time of W.
        communication: Latency of one hop between two ranks; it occupies no rank.
        held_for_weight: Share of a stage's activation that stays until W; 1.0 keeps all of it (M_W / M_B in the zero
            bubble papers).
        backward_full: Time of B; I and W together where None.
        overlap: Time of an overlapped forward and backward; the two after each other where None.
        activation: Size of a stage's activation of one microbatch.
        gradient_reduction: Time to reduce the gradients of a stage over replicas, on a stream of its own after the
            last backward of the stage.
        optimizer_barrier: Time of a synchronisation of all ranks before the optimizer step; None where ranks step on
            their own.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    communication: float = 0.0
    held_for_weight: PerStage = 1.0
    backward_full: PerStage | None = None
    overlap: PerStage | None = None
    activation: PerStage = 1.0
    gradient_reduction: PerStage = 0.0
    optimizer_barrier: float | None = None

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if value is None:
                continue
            if not isinstance(value, (int, float)):
                object.__setattr__(self, entry.name, tuple(value))
            if any(not number >= 0 for number in _numbers(getattr(self, entry.name))):
                raise ScheduleError(f"Costs.{entry.name} is {value}; expected numbers of at least 0")
        if any(share > 1 for share in _numbers(self.held_for_weight)):
            raise ScheduleError(f"Costs.held_for_weight is {self.held_for_weight}; it is a share, from 0 to 1")

    def divide(self, parts: int) -> Costs:
        """Costs of one of several equal stages that a stage of these costs is cut into; latency stays."""
        changes: dict[str, Any] = {}
        for name in ("forward", "backward_input", "backward_weight", "backward_full", "overlap", "gradient_reduction"):
            value = getattr(self, name)
            if isinstance(value, tuple):
                raise ScheduleError(f"Costs.{name} has one number per stage; only costs equal for all can be divided")
            changes[name] = None if value is None else value / parts
        return dataclasses.replace(self, **changes)

    def for_stages(self, num_stages: int) -> StageCosts:
        """One number per stage for everything.

        Raises:
            ScheduleError: A sequence of another length than the number of stages.
        """
        columns: dict[str, tuple[float, ...]] = {}
        for name in ("forward", "backward_input", "backward_weight", "held_for_weight", "activation"):
            columns[name] = _spread(name, getattr(self, name), num_stages)
        full = [i + w for i, w in zip(columns["backward_input"], columns["backward_weight"], strict=True)]
        if self.backward_full is not None:
            full = list(_spread("backward_full", self.backward_full, num_stages))
        times = (columns["forward"], tuple(full), columns["backward_input"], columns["backward_weight"])
        overlap = None if self.overlap is None else _spread("overlap", self.overlap, num_stages)
        reduction = _spread("gradient_reduction", self.gradient_reduction, num_stages)
        return StageCosts(
            times, overlap, self.communication, columns["held_for_weight"], columns["activation"], reduction
        )


@dataclass(frozen=True)
class StageCosts:
    """:class:`Costs` with one number per stage.

    Attributes:
        times: Times of F, B, I and W, each per stage, in the order of :class:`ActionKind`.
        overlap: Time of an overlapped pair, by the stage of its forward.
        communication: Latency of one hop.
        held: Share of the activation that stays until W.
        activation: Size of the activation.
        reduction: Time to reduce the gradients.
    """

    times: tuple[tuple[float, ...], ...]
    overlap: tuple[float, ...] | None
    communication: float
    held: tuple[float, ...]
    activation: tuple[float, ...]
    reduction: tuple[float, ...]

    def duration(self, action: ActionBase) -> float:
        """Time of one compute action."""
        if action.kind is not ActionKind.OVERLAP:
            return self.times[action.kind][action.stage]
        if self.overlap is not None:
            return self.overlap[action.stage]
        return sum(self.times[part.kind][part.stage] for part in action.parts)

    def memory_change(self, part: ActionBase) -> float:
        """Change of held activations by one compute action: at its start for F, at its end for the others."""
        size = self.activation[part.stage]
        if part.kind is ActionKind.I:
            return (self.held[part.stage] - 1.0) * size
        return {ActionKind.F: size, ActionKind.B: -size}.get(part.kind, -self.held[part.stage] * size)


def _numbers(value: PerStage) -> tuple[float, ...]:
    return (float(value),) if isinstance(value, (int, float)) else tuple(value)


def _spread(name: str, value: PerStage, num_stages: int) -> tuple[float, ...]:
    if isinstance(value, (int, float)):
        return (float(value),) * num_stages
    if len(value) != num_stages:
        raise ScheduleError(f"Costs.{name} has {len(value)} numbers for {num_stages} stages; give one per stage")
    return tuple(value)


UNIT_COSTS = Costs()
"""F = I = W = 1, no latency, all memory held until W."""
