"""From a trace and a placement to what crosses each boundary."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import nn

from d9d_lightning.errors import PartitionError
from d9d_lightning.partition.differentiation import DIFFERENTIATION
from d9d_lightning.partition.structure import Constant, Leaf
from d9d_lightning.partition.units import parameter_owners
from d9d_lightning.values import Boundary, Placement, Plan, Trace, ValueId

__all__ = ["make_plan", "parameter_stages"]


def make_plan(root: nn.Module, units: Mapping[str, nn.Module], trace: Trace, placement: Placement) -> Plan:
    """Work out what each stage receives and sends.

    Raises:
        PartitionError: A value would have to flow to an earlier stage.
    """
    last = placement.num_stages - 1
    _check_differentiation(trace, placement)
    _check_generators(trace, placement)
    stage_of_call = [placement.stage_of(call.unit) for call in trace.calls]
    homes = parameter_stages(root, units, trace, placement)
    needed_at: dict[ValueId, int] = {}

    def use(value: ValueId, stage: int, reader: str) -> None:
        made = stage_of_call[value.call]
        if made > stage:
            raise PartitionError(
                f"{reader} (stage {stage}) needs what {trace.calls[value.call].unit!r} (stage {made}) makes: the value "
                "would flow backward through the pipeline. Expected: units that depend on each other both ways on one "
                "stage; pass split_points=[...] to D9DStrategy with a border that keeps them together."
            )
        needed_at[value] = max(needed_at.get(value, made), stage)

    for call, stage in zip(trace.calls, stage_of_call, strict=True):
        for value in call.needs:
            use(value, stage, f"unit {call.unit!r}")
    for value in trace.tail_needs:
        use(value, last, "the end of the step")
    for name, sources in trace.written_parameters.items():
        for source in sources:
            if isinstance(source, ValueId):
                use(source, homes[name][0], f"the write into {name!r}")
    return Plan(
        placement=placement,
        trace=trace,
        boundaries=_boundaries(needed_at, stage_of_call, placement.num_stages),
        last_calls=tuple(
            max((i for i, owner in enumerate(stage_of_call) if owner == stage), default=-1)
            for stage in range(placement.num_stages)
        ),
        shared={name: stages for name, stages in homes.items() if len(stages) > 1},
        digest=_digest(trace, placement),
    )


def _check_differentiation(trace: Trace, placement: Placement) -> None:
    for together in trace.joined:
        units = list(dict.fromkeys(trace.calls[number].unit for number in sorted(together)))
        if len({placement.unit_stage.get(unit) for unit in units}) > 1:
            between = [unit for unit in units if unit != DIFFERENTIATION]
            raise PartitionError(
                f"the step now calls {DIFFERENTIATION} through the units {between!r}, which do not share a stage, as "
                "the step that the placement was made from did not differentiate through them. Expected: the same "
                "differentiation in the first batch; give an example_batch=... to D9DStrategy that shows it, name a "
                "unit around these with units=[...], or keep them together with split_points=[...]."
            )


def _check_generators(trace: Trace, placement: Placement) -> None:
    drawing: dict[str, list[str]] = {}
    for name, unit in trace.lent_generators:
        drawing.setdefault(name, []).append(unit)
    if placement.num_stages > 1 and drawing:
        name, units = next(iter(drawing.items()))
        raise PartitionError(
            f"the units {units!r} draw from the random generator {name!r}, which other parts of the step hold too. On "
            "a stage that does not run these units it would not move on. Expected: a generator of its own in each "
            "unit, or torch's global one (leave out generator=...), which every stage keeps in step."
        )


def _boundaries(needed_at: Mapping[ValueId, int], stage_of_call: list[int], num_stages: int) -> tuple[Boundary, ...]:
    receives = [
        tuple(sorted(v for v, until in needed_at.items() if stage_of_call[v.call] < stage <= until))
        for stage in range(num_stages)
    ]
    return tuple(Boundary(receives[s], receives[s + 1] if s + 1 < num_stages else ()) for s in range(num_stages))


def parameter_stages(
    root: nn.Module, units: Mapping[str, nn.Module], trace: Trace, placement: Placement
) -> dict[str, tuple[int, ...]]:
    """Stages that hold each parameter; the first one is its home.

    A parameter lives with its unit. One that glue reads, or that several units hold, lives on every stage that uses it.
    One that nothing uses lives on the last stage. A copy and its original live on the stages of both, unless the step
    writes one of them: it does so at home only, and elsewhere old values would stay.
    """
    names: dict[int, str] = {id(p): name for name, p in root.named_parameters()}
    stages: dict[str, set[int]] = {name: set() for name in names.values()}
    called = {call.unit for call in trace.calls}
    for unit, module in units.items():
        if unit in called:
            for parameter in module.parameters():
                stages[names[id(parameter)]].add(placement.stage_of(unit))
    last = placement.num_stages - 1
    for call in trace.calls:
        for name in call.raw_parameters:
            stages[name].add(placement.stage_of(call.unit))
    for name in trace.tail_parameters:
        stages[name].add(last)
    owners = parameter_owners(root, dict(units))
    for name, found in stages.items():
        if not found:
            owner = owners[name]
            found.add(last if owner is None else placement.stage_of(owner))
    for name, sources in trace.written_parameters.items():
        for source in sources:
            if isinstance(source, str):
                stages[source] |= stages[name]
    families: dict[str, set[str]] = {}
    for copy, original in trace.copies.items():
        if {copy, original} & trace.written_parameters.keys():
            continue
        families.setdefault(original, {original}).add(copy)
    for family in families.values():
        # a hook may update or swap any of them from any other
        together = set().union(*(stages[name] for name in family))
        stages.update(dict.fromkeys(family, together))
    return {name: tuple(sorted(found)) for name, found in stages.items()}


def _digest(trace: Trace, placement: Placement) -> str:
    """Equal on ranks that agree; device indices and object identities are left out."""
    text = hashlib.sha256()
    for call in trace.calls:
        needs = ",".join(value.name for value in sorted(call.needs))
        values = ";".join(f"{v.shape}{v.dtype}{v.requires_grad}{v.dynamic_shape}" for v in call.values)
        form = _form(call.effects.template) if call.effects is not None else ""
        text.update(f"{call.unit}|{call.number}|{needs}|{sorted(call.raw_parameters)}|{values}|{form}\n".encode())
    text.update(f"{sorted(trace.tail_needs)}{sorted(trace.tail_parameters)}{trace.changed_state}".encode())
    written = sorted((name, sorted(map(str, sources))) for name, sources in trace.written_parameters.items())
    text.update(
        f"{sorted(trace.overwritten)}{sorted(trace.overwritten_inputs)}{sorted(trace.entry_draws)}{written}".encode()
    )
    text.update(f"{placement.num_stages}{sorted(placement.unit_stage.items())}".encode())
    return text.hexdigest()[:16]


def _form(template: object) -> str:
    if isinstance(template, Leaf):
        return f"t{template.index}"
    if isinstance(template, Constant):
        plain = template.value is None or isinstance(template.value, bool | int | float | str)
        return repr(template.value) if plain else type(template.value).__name__
    children = ",".join(_form(child) for child in template.children)  # type: ignore[attr-defined]
    return f"{template.kind}({children})"  # type: ignore[attr-defined]
