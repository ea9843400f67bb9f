"""What one rank can be asked to do, as frozen values that print and parse: ``2F0`` is stage 2, forward, microbatch 0.

Actions are data. They know no stage module and no process group; the executor gives them meaning.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from d9d_lightning.errors import ScheduleError

__all__ = [
    "ActionBase",
    "ActionKind",
    "BackwardFullInputComputeAction",
    "BackwardReceiveAction",
    "BackwardSendAction",
    "BackwardWeightComputeAction",
    "ComposeAction",
    "ForwardComputeAction",
    "ForwardReceiveAction",
    "ForwardSendAction",
    "backward_full",
    "backward_input",
    "backward_weight",
    "forward",
    "parse_action",
]


class ActionKind(enum.IntEnum):
    """What an action does. The names are the letters of the text form."""

    F = 0
    """Forward of one stage."""
    B = 1
    """Full backward: gradients of the stage's inputs and weights at once."""
    I = 2  # noqa: E741  (the letter of the papers and of the text form)
    """Gradients of the stage's inputs only."""
    W = 3
    """Gradients of the stage's weights, after I."""
    SEND_F = 4
    """Send the stage's outputs to the next stage."""
    RECV_F = 5
    """Receive the stage's inputs from the previous stage."""
    SEND_B = 6
    """Send the gradients of the stage's inputs to the previous stage."""
    RECV_B = 7
    """Receive the gradients of the stage's outputs from the next stage."""
    OVERLAP = 8
    """A forward and a backward that may run at the same time."""

    @property
    def is_compute(self) -> bool:
        """Whether the action computes; the others move tensors between ranks."""
        return self < ActionKind.SEND_F or self is ActionKind.OVERLAP


class ActionBase:
    """Base of all actions.

    Attributes:
        kind: What the action does.
        stage: Stage it belongs to (of the forward, for an overlapped pair).
        microbatch: Microbatch it belongs to (of the forward, for an overlapped pair).
        parts: The compute actions it consists of; itself, except for an overlapped pair.
    """

    kind: ActionKind
    stage: int
    microbatch: int
    parts: tuple[ActionBase, ...]
    _text: str
    _hash: int

    def _settle(self, kind: ActionKind, stage: int, microbatch: int, text: str) -> None:
        # Text and hash are computed once: programs of tens of thousands of actions are compared, printed and hashed.
        fields = {"kind": kind, "stage": stage, "microbatch": microbatch, "_text": text, "_hash": hash(text)}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        return self._text

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Callable[[str], ActionBase], tuple[str]]:
        # Hashes of text differ between processes, so an action is pickled as its text.
        return parse_action, (self._text,)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return self._text == other._text if isinstance(other, ActionBase) else NotImplemented


@dataclass(frozen=True, eq=False)
class _StageAction(ActionBase):
    """An action of one stage and one microbatch."""

    stage_idx: int
    microbatch_idx: int

    KIND: ClassVar[ActionKind]

    def __post_init__(self) -> None:
        kind = self.KIND
        self._settle(kind, self.stage_idx, self.microbatch_idx, f"{self.stage_idx}{kind.name}{self.microbatch_idx}")
        object.__setattr__(self, "parts", (self,))


@dataclass(frozen=True, eq=False)
class ForwardComputeAction(_StageAction):
    """Forward of one stage and microbatch: ``2F0``."""

    KIND = ActionKind.F


@dataclass(frozen=True, eq=False)
class BackwardFullInputComputeAction(_StageAction):
    """Backward of one stage and microbatch: everything (``2B0``), or the input gradients only (``2I0``)."""

    full_backward: bool = True

    def __post_init__(self) -> None:
        kind = ActionKind.B if self.full_backward else ActionKind.I
        self._settle(kind, self.stage_idx, self.microbatch_idx, f"{self.stage_idx}{kind.name}{self.microbatch_idx}")
        object.__setattr__(self, "parts", (self,))


@dataclass(frozen=True, eq=False)
class BackwardWeightComputeAction(_StageAction):
    """Weight gradients of one stage and microbatch, after its input gradients: ``2W0``."""

    KIND = ActionKind.W


@dataclass(frozen=True, eq=False)
class ForwardSendAction(_StageAction):
    """Send the outputs of a stage to the rank of the next one: ``2SEND_F0``."""

    KIND = ActionKind.SEND_F


@dataclass(frozen=True, eq=False)
class ForwardReceiveAction(_StageAction):
    """Post the receive of a stage's inputs; the forward that needs them waits: ``2RECV_F0``."""

    KIND = ActionKind.RECV_F


@dataclass(frozen=True, eq=False)
class BackwardSendAction(_StageAction):
    """Send the input gradients of a stage to the rank of the previous one: ``2SEND_B0``."""

    KIND = ActionKind.SEND_B


@dataclass(frozen=True, eq=False)
class BackwardReceiveAction(_StageAction):
    """Post the receive of a stage's output gradients; the backward that needs them waits: ``2RECV_B0``."""

    KIND = ActionKind.RECV_B


@dataclass(frozen=True, eq=False)
class ComposeAction(ActionBase):
    """A forward and a backward of different stages that may overlap: ``(0F3;7B0)OVERLAP_F_B``.

    Attributes:
        actions: The forward, then the backward. An executor without real overlap runs them in this order.
    """

    actions: tuple[ActionBase, ...]
    parts: tuple[ActionBase, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.actions) < 2 or not all(part.kind < ActionKind.SEND_F for part in self.actions):
            raise ScheduleError(
                f"an overlapped action was given ({'; '.join(map(str, self.actions))}); it needs at least two compute "
                "actions, for example ComposeAction((ForwardComputeAction(0, 3), BackwardFullInputComputeAction(7, 0)))"
            )
        object.__setattr__(self, "actions", tuple(self.actions))
        object.__setattr__(self, "parts", self.actions)
        first = self.actions[0]
        text = f"({';'.join(map(str, self.actions))})OVERLAP_F_B"
        self._settle(ActionKind.OVERLAP, first.stage, first.microbatch, text)


# Builders make the same few thousand values over and over; sharing them makes comparisons a pointer check.
@functools.lru_cache(maxsize=1 << 16)
def forward(stage: int, microbatch: int) -> ForwardComputeAction:
    """``sFm``, shared between programs."""
    return ForwardComputeAction(stage, microbatch)


@functools.lru_cache(maxsize=1 << 16)
def backward_full(stage: int, microbatch: int) -> BackwardFullInputComputeAction:
    """``sBm``, shared between programs."""
    return BackwardFullInputComputeAction(stage, microbatch, full_backward=True)


@functools.lru_cache(maxsize=1 << 16)
def backward_input(stage: int, microbatch: int) -> BackwardFullInputComputeAction:
    """``sIm``, shared between programs."""
    return BackwardFullInputComputeAction(stage, microbatch, full_backward=False)


@functools.lru_cache(maxsize=1 << 16)
def backward_weight(stage: int, microbatch: int) -> BackwardWeightComputeAction:
    """``sWm``, shared between programs."""
    return BackwardWeightComputeAction(stage, microbatch)


_PATTERN = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)")
_MAKERS: dict[str, Callable[[int, int], ActionBase]] = {
    "F": forward,
    "B": backward_full,
    "I": backward_input,
    "W": backward_weight,
    "SEND_F": ForwardSendAction,
    "RECV_F": ForwardReceiveAction,
    "SEND_B": BackwardSendAction,
    "RECV_B": BackwardReceiveAction,
}
_OVERLAP_END = ")OVERLAP_F_B"


@functools.lru_cache(maxsize=1 << 17)
def parse_action(text: str) -> ActionBase:
    """Inverse of ``str(action)``.

    Args:
        text: One action, for example ``2F0``, ``2SEND_B1`` or ``(0F3;7B0)OVERLAP_F_B``.

    Raises:
        ScheduleError: The text is no action.
    """
    if text.startswith("(") and text.endswith(_OVERLAP_END):
        return ComposeAction(tuple(parse_action(part.strip()) for part in text[1 : -len(_OVERLAP_END)].split(";")))
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ScheduleError(
            f"{text!r} is no action; expected <stage><kind><microbatch> with a kind of {', '.join(_MAKERS)} "
            "(for example 2F0), or (0F3;7B0)OVERLAP_F_B"
        )
    stage, kind, microbatch = match.groups()
    return _MAKERS[kind](int(stage), int(microbatch))
