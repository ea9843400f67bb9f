"""Traces of one kind of step, and the plans made from them, by the signature of a microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from d9d_lightning.errors import PartitionError, PlaceholderReadError
from d9d_lightning.partition.copies import find_copies, mirror_units, originals_of_units
from d9d_lightning.partition.custom_functions import InsideFunctionError
from d9d_lightning.partition.differentiation import DIFFERENTIATION, differentiation_unit
from d9d_lightning.partition.effects import Effects
from d9d_lightning.partition.interception import Interceptor
from d9d_lightning.partition.placement import find_oversized, group_units, place_units
from d9d_lightning.partition.plan import make_plan
from d9d_lightning.partition.snapshot import ModuleSnapshot
from d9d_lightning.partition.structure import flatten
from d9d_lightning.partition.trace import Exchange, Meter, TraceDepth, trace_step
from d9d_lightning.partition.units import canonical_units, join_into_parent, parameter_owners, split_largest, split_unit
from d9d_lightning.stage.randomness import set_position
from d9d_lightning.stage.replay import StepCall
from d9d_lightning.stage.signature import Described, Signature, describe_batch
from d9d_lightning.values import Microbatch, Placement, Plan, Trace, UnitCall

__all__ = ["Planner"]

_PATIENCE = 4
"""Plans of one signature that may turn out wrong before the content of the batch becomes part of the signature."""


class Planner:
    """Finds units and placement once, and a plan for each signature.

    Args:
        root: The user's module.
        sinks: Methods that only take values out of the step.
        silenced: Modules whose attributes a trace need not restore.
        unit_patterns: Names or patterns of units that the user wants.
        split_points: Units that stages begin with.
        device: Where parameters that have no memory yet will live.

    Attributes:
        units: Units by qualified name.
        interceptor: Catches their calls.
        placement: Where each unit lives; None before :meth:`place`.
        setup_trace: The trace that the placement was made from.
        notes: What a user should be told about how the step is traced.
        exchange: Runs units on their owners; None while this process holds the whole module.
        lend: Around a trace in lockstep, gives this rank the parameters that glue reads.
        meter: Measures calls of units while a step is traced.
        agree: From whether shapes did not suffice here to whether they did not suffice on some rank.
    """

    def __init__(
        self,
        root: nn.Module,
        sinks: Sequence[tuple[Any, str]] = (),
        silenced: Sequence[nn.Module] = (),
        unit_patterns: Sequence[str] | None = None,
        split_points: Sequence[str] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.root = root
        self._device = device
        self._sinks = tuple(sinks)
        self._silenced = tuple(silenced)
        self._split_points = split_points
        self.units = canonical_units(root, unit_patterns)
        self.interceptor = Interceptor(self.units, self._sinks)
        self._whole: set[str] = set()
        self._units_are_ours = unit_patterns is None and split_points is None
        self._modules: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []
        self.refresh()
        self.placement: Placement | None = None
        self.setup_trace = Trace((), frozenset(), frozenset())
        self.notes: list[str] = []
        self.exchange: Exchange | None = None
        self.lend: Callable[[], AbstractContextManager[None]] = nullcontext
        self.meter: Meter | None = None
        self.agree: Callable[[bool], bool] = bool
        self._plans: dict[Signature, Plan] = {}
        self._voided: dict[Signature, int] = {}

    def trace(self, step: StepCall, microbatch: Microbatch) -> Trace:
        """Trace one microbatch, with shapes only where that is enough.

        Raises:
            PartitionError: The step cannot be traced.
        """
        trace, before = self._trace_once(step, microbatch, keep_plain_state=True)
        if not trace.changed_state:
            return trace
        lasting: set[str] = set()
        try:
            # What changes the first time only (a cache filled, hooks installed, an option inferred) is
            # initialisation: it happens on every rank now, so that no private copy of it has to be kept.
            again, _ = self._trace_once(step, microbatch)
            lasting = set(trace.changed_state) - set(again.changed_state)
            return again
        finally:
            before.restore(lasting)

    def _trace_once(
        self, step: StepCall, microbatch: Microbatch, keep_plain_state: bool = False
    ) -> tuple[Trace, ModuleSnapshot]:
        """Also the state before the run, to which plain state can be put back."""
        failure: Exception | None = None
        traced: tuple[Trace, ModuleSnapshot] | None = None
        try:
            traced = self._trace_at(TraceDepth.SHAPES, step, microbatch, keep_plain_state)
        except PartitionError:
            raise  # no depth will help
        except Exception as error:
            # A step may fail on placeholders in any way; with real values its own error, if it has one, comes out.
            failure = error
        if not self.agree(failure is not None) and traced is not None:
            return traced
        if traced is not None:
            traced[1].restore()  # this rank has a run more than the one that failed
        if failure is not None:
            self._note_depth(failure)
        with self.lend():
            return self._trace_at(TraceDepth.VALUES, step, microbatch, keep_plain_state)

    def _note_depth(self, error: Exception) -> None:
        reason = str(error) if isinstance(error, PlaceholderReadError) else f"{type(error).__name__}: {error}"
        note = f"the step is traced with real values, because shapes alone do not suffice: {reason}"
        if note not in self.notes:
            self.notes.append(note)

    def _trace_at(
        self, depth: TraceDepth, step: StepCall, microbatch: Microbatch, keep_plain_state: bool
    ) -> tuple[Trace, ModuleSnapshot]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return step(Microbatch(microbatch.index, microbatch.size, args, microbatch.seed, kwargs))

        snapshot = ModuleSnapshot(self.root, self._silenced)
        trace = trace_step(
            self.root,
            self.interceptor,
            call,
            microbatch.args,
            microbatch.kwargs,
            depth=depth,
            exchange=self.exchange if depth is TraceDepth.VALUES else None,
            keep_plain_state=keep_plain_state,
            device=self._device,
            position=lambda kinds, unit, number: set_position(kinds, microbatch.seed, unit, number),
            meter=self.meter,
            snapshot=snapshot,
            count_flops=self.placement is None,  # only the placement asks for them
        )
        return trace, snapshot

    def place(self, step: StepCall, microbatch: Microbatch, stage_to_rank: Sequence[int]) -> Placement:
        """Fix the placement from one microbatch.

        Raises:
            PartitionError: There is no unit, or the given split points do not fit.
        """
        if not self._parameters:
            raise PartitionError("the module has no parameters, so there is nothing to place on stages")
        trace = self._trace_until_units_are_called(step, microbatch)
        trace = self._split_until_enough(trace, step, microbatch, len(stage_to_rank))
        if self._units_are_ours:
            trace = self._split_oversized(trace, step, microbatch, len(stage_to_rank))
        groups = group_units(trace)
        trace = self._with_copies(trace)
        self.setup_trace = trace
        self.placement = place_units(trace, self.units, stage_to_rank, self._split_points)
        self._note_empty_stages(groups)
        return self.placement

    def _with_copies(self, trace: Trace) -> Trace:
        """The trace, told which parameters are copies that a hook may update from others."""
        called = {call.unit for call in trace.calls}
        owners = parameter_owners(self.root, self.units)
        used = {name for name, unit in owners.items() if unit in called}
        used |= trace.tail_parameters.union(*(call.raw_parameters for call in trace.calls))
        copies = find_copies(self.root, used)
        finer = mirror_units(self.root, self.units, copies, called)
        if finer is not self.units:
            self._use(finer)
        originals = originals_of_units(self.root, self.units, copies)
        lodgers = {unit: min(found) for unit, found in originals.items() if unit not in called}
        return replace(trace, copies=copies, lodgers=lodgers)

    def _split_until_enough(self, trace: Trace, step: StepCall, microbatch: Microbatch, wanted: int) -> Trace:
        while len(groups := group_units(trace)) < wanted:
            # the parts of what a differentiation goes through would have to share a stage again
            apart = [unit for group in groups if DIFFERENTIATION not in group for unit in group]
            finer = split_largest(self.units, [unit for unit in apart if unit not in self._whole])
            if finer is None:
                break
            trace = self._trace_split(*finer, step, microbatch) or trace
        return trace

    def _split_oversized(self, trace: Trace, step: StepCall, microbatch: Microbatch, num_stages: int) -> Trace:
        """Units much larger than the rest are replaced by their parts, where that gives more to place."""
        while (name := find_oversized(trace, num_stages, self._whole)) is not None:
            before, finer = self.units, split_unit(self.units, name)
            parts = None if finer is None else self._trace_split(finer, name, step, microbatch)
            if parts is not None and len(group_units(parts)) > len(group_units(trace)):
                trace = parts
            else:
                self._use(before)
                self._whole.add(name)
        return trace

    def _trace_split(
        self, units: dict[str, nn.Module], name: str, step: StepCall, microbatch: Microbatch
    ) -> Trace | None:
        """A trace after a unit was split; None, and the units as before, where a custom function holds it together."""
        before = self.units
        try:
            return self._trace_with(units, step, microbatch)
        except InsideFunctionError:
            self._use(before)
            self._whole.add(name)
            return None

    def _note_empty_stages(self, groups: Sequence[Sequence[str]]) -> None:
        placement = self.placement
        if placement is None or len(groups) >= placement.num_stages:
            return
        together = max(groups, key=len, default=())
        why = ""
        if len(together) > 1:
            reason = "a differentiation goes through them" if DIFFERENTIATION in together else "they need each other"
            names = [unit for unit in together if unit != DIFFERENTIATION]
            why = f"; {len(names)} units ({names[0]!r}, ...) share a stage, because {reason}"
        self.notes.append(
            f"{placement.num_stages - len(groups)} of {placement.num_stages} stages have no unit and only pass values "
            f"on, because the step has {len(groups)} parts that can be placed apart{why}"
        )

    def place_by_registration(self, stage_to_rank: Sequence[int]) -> Placement:
        """Fix the placement without a batch: the order of registration stands for the order of calls."""
        template, _ = flatten((None, [], [], [], []))
        calls = [UnitCall(unit, 0, frozenset(), frozenset(), Effects(template), ()) for unit in self.units]
        self.setup_trace = Trace(tuple(calls), frozenset(), frozenset())
        self.placement = place_units(self.setup_trace, self.units, stage_to_rank, self._split_points)
        return self.placement

    def _trace_until_units_are_called(self, step: StepCall, microbatch: Microbatch) -> Trace:
        """Units whose parts are called one by one from outside are replaced by these parts."""
        trace = self._trace_around_functions(step, microbatch)
        if trace.joined:
            self.units[DIFFERENTIATION] = differentiation_unit()
        for _ in range(8):
            called = {call.unit for call in trace.calls}
            read = set(trace.tail_parameters).union(*(call.raw_parameters for call in trace.calls))
            bypassed = [
                name
                for name in self.units
                if name not in called and any(parameter.startswith(f"{name}.") for parameter in read)
            ]
            finer, changed = self.units, False
            for name in bypassed:
                split = split_unit(finer, name)
                if split is not None:
                    finer, changed = split, True
            if not changed:
                break
            trace = self._trace_with(finer, step, microbatch)
        return trace

    def _trace_around_functions(self, step: StepCall, microbatch: Microbatch) -> Trace:
        """Units that a custom autograd function calls are replaced by the module around them."""
        while True:
            try:
                return self.trace(step, microbatch)
            except InsideFunctionError as error:
                coarser = join_into_parent(self.root, self.units, error.unit)
                if coarser is None:
                    raise
                self._whole |= coarser.keys() - self.units.keys()
                self._use(coarser)

    def _use(self, units: dict[str, nn.Module]) -> None:
        self.units = units
        self.interceptor = Interceptor(units, self._sinks)

    def _trace_with(self, units: dict[str, nn.Module], step: StepCall, microbatch: Microbatch) -> Trace:
        self._use(units)
        return self.trace(step, microbatch)

    def describe(self, kind: str, microbatches: Sequence[Microbatch]) -> list[Described]:
        """Take the microbatches of one step apart; what the other methods ask for."""
        return describe_batch(kind, self._modules, self._parameters, microbatches)

    def refresh(self) -> None:
        """Look at the module again, after parameters were replaced."""
        self._modules = list(self.root.modules())
        self._parameters = list(self.root.parameters())

    def knows(self, described: Described) -> bool:
        """Whether there is a plan for a microbatch."""
        return self._key(described) in self._plans

    def _key(self, described: Described) -> Signature:
        key = described.signature
        if self._voided and self._voided.get(key, 0) > _PATIENCE:
            return (*key, described.content())
        return key

    def plan(self, step: StepCall, described: Described, *, fresh: bool = False) -> Plan:
        """The plan for a microbatch.

        Args:
            step: Calls the user's step.
            described: The microbatch.
            fresh: Trace again even where the signature is known, after a call that the plan does not have.
        """
        placement = self.placement
        if placement is None:
            raise PartitionError("place() must come before plan()")
        if fresh:
            self._voided[described.signature] = self._voided.get(described.signature, 0) + 1
        key = self._key(described)
        plan = None if fresh else self._plans.get(key)
        if plan is None:
            trace = self.trace(step, described.microbatch)
            plan = make_plan(self.root, self.units, trace, placement)
            self._plans[key] = plan
        return plan
