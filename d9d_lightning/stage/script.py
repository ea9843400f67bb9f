"""What one stage does at each unit call of a step: worked out once per plan, looked up at every call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from d9d_lightning.partition.effects import Effects
from d9d_lightning.partition.placeholder import Placeholder
from d9d_lightning.partition.shapes import Geometry
from d9d_lightning.partition.structure import Leaf
from d9d_lightning.values import Plan, ValueId, ValueSpec

__all__ = ["CallEntry", "StageScript", "describe_call", "make_script"]


@dataclass(slots=True)
class CallEntry:
    """One unit call as one stage sees it.

    Attributes:
        unit: Name of the unit.
        number: How often the unit was called before.
        owned: Whether this stage runs it.
        effects: What the call makes visible.
        specs: The visible values.
        draws: Random generators that the call advances.
        kept: Of an owned call, the values that other stages need: leaf, value, whether it is changed in place later.
        received: Of a skipped call, leaf to value for those that this stage receives.
        bare: Whether the call returns a single tensor and has no other effect.
        reusable: Whether one placeholder can stand for a value in every microbatch.
        answer: The placeholder that a skipped bare call returns, where one object can serve every time.
        placeholders: Those made so far, by leaf.
    """

    unit: str
    number: int
    owned: bool
    effects: Effects
    specs: tuple[ValueSpec, ...]
    draws: frozenset[str]
    kept: tuple[tuple[int, ValueId, bool], ...]
    received: Mapping[int, ValueId]
    bare: bool
    reusable: bool
    answer: Placeholder | None = None
    placeholders: dict[int, Placeholder] = field(default_factory=dict)

    def placeholder(self, leaf: int) -> Placeholder:
        """A placeholder for a value that this stage does not have."""
        made = self.placeholders.get(leaf)
        if made is None:
            made = _make_placeholder(self.specs[leaf], self.unit)
            if self.reusable:
                self.placeholders[leaf] = made
        return made


@dataclass(frozen=True, slots=True)
class StageScript:
    """All calls of a step as one stage sees them.

    Attributes:
        stage: The stage.
        plan: The plan this was made from.
        entries: One per unit call.
        last_call: Number of the stage's last own call; -1 where it has none.
        is_loss_owner: Whether the stage finishes the step.
        runs_to_the_end: Whether the replay goes on, on placeholders, after the last own call, because the rest of the
            step changes state that the next microbatch may read.
        cut_inside_region: Whether the last own call lies in a checkpointed region, which must be left before the cut.
    """

    stage: int
    plan: Plan
    entries: tuple[CallEntry, ...]
    last_call: int
    is_loss_owner: bool
    runs_to_the_end: bool
    cut_inside_region: bool


def make_script(plan: Plan, stage: int) -> StageScript:
    """Work out what a stage does at each call."""
    boundary = plan.boundaries[stage]
    sent = set(boundary.sends)
    received = set(boundary.receives)
    trace = plan.trace
    entries = []
    for index, call in enumerate(trace.calls):
        values = [ValueId(index, leaf) for leaf in range(len(call.values))]
        owned = plan.placement.stage_of(call.unit) == stage
        changed = any(value in trace.overwritten for value in values)
        effects: Effects = call.effects
        result = effects.template.children[0]
        entry = CallEntry(
            unit=call.unit,
            number=call.number,
            owned=owned,
            effects=effects,
            specs=call.values,
            draws=call.draws,
            kept=tuple((v.leaf, v, v in trace.overwritten) for v in values if owned and v in sent),
            received={v.leaf: v for v in values if not owned and v in received},
            bare=effects.result_only and isinstance(result, Leaf),
            reusable=not changed,
        )
        if entry.bare and not owned and not entry.received and entry.reusable:
            entry.answer = entry.placeholder(0)
        entries.append(entry)
    last_call = plan.last_calls[stage]
    changes_state = bool(trace.changed_state or trace.written_parameters)
    return StageScript(
        stage=stage,
        plan=plan,
        entries=tuple(entries),
        last_call=last_call,
        is_loss_owner=stage == plan.placement.num_stages - 1,
        runs_to_the_end=changes_state,
        cut_inside_region=last_call >= 0 and trace.calls[last_call].region is not None,
    )


def _make_placeholder(spec: ValueSpec, unit: str) -> Placeholder:
    device = torch.device(spec.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    stride = spec.stride or torch.empty(spec.shape, device="meta").stride()
    geometry = Geometry(spec.shape, stride, 0, spec.dtype, device)
    if spec.requires_grad and torch.is_grad_enabled():
        return Placeholder.non_leaf(geometry, unit)
    return Placeholder(geometry, unit)


def describe_call(entry: CallEntry) -> str:
    """``unit model.layers.7 (call 1)``."""
    return f"unit {entry.unit!r}" + (f" (call {entry.number + 1})" if entry.number else "")
