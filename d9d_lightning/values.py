"""The frozen types that the layers exchange. This file computes nothing.

Data flows one way: a :class:`Trace` of the user's step and a :class:`Placement` of its units give a :class:`Plan`;
the plan says which :class:`ValueId` crosses which boundary. The runtime turns one optimizer step into
:class:`LogRecord` and one :class:`StepStatus`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "Boundary",
    "LogRecord",
    "Microbatch",
    "Placement",
    "Plan",
    "StepStatus",
    "Trace",
    "UnitCall",
    "ValueId",
    "ValueSpec",
]


@dataclass(frozen=True, order=True, slots=True)
class ValueId:
    """One tensor that a unit call makes visible: the ``leaf``-th tensor of the ``call``-th unit call of a step."""

    call: int
    leaf: int

    @property
    def name(self) -> str:
        """The name on the wire; zero-padded, so that the order of names is the order of values."""
        return f"{self.call:06d}.{self.leaf:04d}"

    @classmethod
    def parse(cls, name: str) -> ValueId:
        """Inverse of :attr:`name`."""
        call, leaf = name.split(".")
        return cls(int(call), int(leaf))


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """What a receiver must know of a value before it arrives.

    Attributes:
        shape: Size of each dim.
        stride: Stride of each dim, in elements.
        dtype: Element type.
        device: Type of device (``"cpu"``, ``"cuda"``); the index is each rank's own.
        requires_grad: Whether a gradient travels back.
        dynamic_shape: The shape depends on data; every message then carries its own shape.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool
    dynamic_shape: bool = False


@dataclass(frozen=True, slots=True)
class UnitCall:
    """One recorded call of a unit.

    Attributes:
        unit: Qualified name of the unit.
        number: How many times this unit was called before, within the step.
        needs: Values that the call reads, directly or through glue.
        raw_parameters: Parameters outside the unit that glue between units fed into the call.
        effects: What the call makes visible (its output and what it writes elsewhere), rebuilt by a replay that skips
            it. Opaque here; ``partition.structure`` knows its form.
        values: One specification for each value that the call makes visible.
        draws: Kinds of random generators the call advances (``"torch"``, ``"python"``, ``"numpy"``).
        region: Calls with the same region share a stage (an activation-checkpointed region); None outside of one.
        flops: Floating point operations of the forward pass.
    """

    unit: str
    number: int
    needs: frozenset[ValueId]
    raw_parameters: frozenset[str]
    effects: Any
    values: tuple[ValueSpec, ...]
    draws: frozenset[str] = frozenset()
    region: int | None = None
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """One run of the user's step, reduced to what its parts need of each other.

    Attributes:
        calls: Unit calls, in order.
        tail_needs: Values that the loss owner needs besides those of its own calls: for the loss, for everything that
            is logged or given to a metric, and for what the step leaves on attributes.
        tail_parameters: Parameters that glue reads for the same purpose.
        overwritten: Values that glue or a later unit changes in place; they are sent as the unit returned them.
        entry_draws: Kinds of random generators that glue before the first unit call advances.
        changed_state: Names (``"net.center"``) of attributes, buffers and generators that glue leaves different from
            what they were. Each stage keeps its own copy of them during a batch.
        written_parameters: Parameters that glue writes into (an average kept by the step), with what the new content
            is made of: values, and names of parameters.
        overwritten_inputs: Positions, among the tensors of the step's arguments, of those changed in place.
        joined: Sets of calls that must share a stage, because a differentiation in the step goes through them.
        copies: Parameters that are copies of others, which a hook may update them from. In the trace of setup only.
        lodgers: Units of copies that the step does not call, and the units of what they are copies of.
        lent_generators: Random generators of the module that units draw from although glue can too: ``(name, unit)``.
        shapes_follow_data: Glue makes tensors whose shapes depend on data, so the next batch may have others.
    """

    calls: tuple[UnitCall, ...]
    tail_needs: frozenset[ValueId]
    tail_parameters: frozenset[str]
    overwritten: frozenset[ValueId] = frozenset()
    entry_draws: frozenset[str] = frozenset()
    changed_state: tuple[str, ...] = ()
    written_parameters: Mapping[str, frozenset[ValueId | str]] = field(default_factory=dict)
    overwritten_inputs: frozenset[int] = frozenset()
    joined: tuple[frozenset[int], ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    lodgers: Mapping[str, str] = field(default_factory=dict)
    lent_generators: tuple[tuple[str, str], ...] = ()
    shapes_follow_data: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Which stage every unit, and so every parameter and buffer, lives on. Fixed once, at setup."""

    num_stages: int
    unit_stage: Mapping[str, int]

    def stage_of(self, unit: str) -> int:
        """Stage of a unit."""
        return self.unit_stage[unit]


@dataclass(frozen=True, slots=True)
class Boundary:
    """What stage ``s`` receives from ``s - 1`` and sends to ``s + 1``, in wire order."""

    receives: tuple[ValueId, ...]
    sends: tuple[ValueId, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A trace under a placement: what crosses each boundary.

    Attributes:
        placement: The fixed placement.
        trace: The trace this plan was made from.
        boundaries: One per stage.
        last_calls: For each stage, the number of its last call; the replay is cut after it.
        shared: Parameter name to the sorted stages that read it, for parameters read by more than one stage.
        digest: Equal on ranks that agree.
    """

    placement: Placement
    trace: Trace
    boundaries: tuple[Boundary, ...]
    last_calls: tuple[int, ...]
    shared: Mapping[str, tuple[int, ...]]
    digest: str

    def spec(self, value: ValueId) -> ValueSpec:
        """Specification of a value."""
        return self.trace.calls[value.call].values[value.leaf]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Arguments of the user's step for one slice of the batch.

    Attributes:
        index: Position in the batch, from 0.
        size: Number of samples.
        args: Positional arguments of the step (the sliced batch first).
        seed: Position of this microbatch in the random-number rule; equal on every rank of a pipeline.
        kwargs: Keyword arguments of the step.
    """

    index: int
    size: int
    args: tuple[Any, ...]
    seed: tuple[int, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One call of ``self.log`` on the loss owner, ready to be repeated on every rank.

    Attributes:
        hook: Name of the hook that logged, for example ``training_step``.
        name: Key given by the user.
        value: The value, detached.
        options: Remaining keyword arguments of the call.
        size: Number of samples of the microbatch that was running.
    """

    hook: str
    name: str
    value: Any
    options: Mapping[str, Any]
    size: int


class StepStatus(enum.IntEnum):
    """Outcome of one step on one rank; the largest one over the pipeline holds for all."""

    FINE = 0
    """Everything was computed."""
    FAILED = 1
    """The user's code or a stage raised: every rank raises."""
    UNPLANNED = 2
    """The step met a call that the plan does not have: trace again and repeat the step.

    It outweighs a failure, which may come of the zeros that a rank sends once it has met such a call.
    """
