"""One run of the user's step that records what its units need of each other.

Three depths, tried in this order by the caller: with shapes only (units answer with placeholders; no memory, no
arithmetic), with values on this process (where the whole module is here), and with values in lockstep (each unit runs
on its owner, and its outputs are sent to all).
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from d9d_lightning.partition.custom_functions import refuse_inside_function
from d9d_lightning.partition.differentiation import DIFFERENTIATION, Output, calls_between
from d9d_lightning.partition.effects import HookRecorder, Observation
from d9d_lightning.partition.flops import counted_flops
from d9d_lightning.partition.generators import LentGenerators
from d9d_lightning.partition.interception import Interceptor
from d9d_lightning.partition.observed import ObservedCall, spec_of, version_of
from d9d_lightning.partition.placeholder import Placeholder, cured_afterwards
from d9d_lightning.partition.provenance import Provenance, Source
from d9d_lightning.partition.shapes import Geometry, cheap_random_numbers
from d9d_lightning.partition.snapshot import ModuleSnapshot, RandomState
from d9d_lightning.partition.structure import copy_containers, tensors_in
from d9d_lightning.values import Trace, UnitCall, ValueId

__all__ = ["Exchange", "Meter", "ObservedCall", "TraceDepth", "trace_step"]


class TraceDepth(enum.Enum):
    """How much of the step is really computed."""

    SHAPES = "shapes"
    """Units give shapes only; glue on the batch is real."""
    VALUES = "values"
    """Everything is computed."""


Exchange = Callable[[str, Callable[[], ObservedCall]], tuple[ObservedCall, bool]]
"""Lockstep: given a unit and how to run it, the observed call, and whether it ran on this process."""


Meter = Callable[[str], contextlib.AbstractContextManager[None]]
"""Around each call of a unit, given its name."""


Position = Callable[[Iterable[str], str, int], None]
"""Sets global generators, of the kinds given, to a position of the step: after which unit, and after which call."""


def _leave_generators(kinds: Iterable[str], unit: str, number: int) -> None:
    """No rule for random numbers."""


def _measure_nothing(unit: str) -> contextlib.AbstractContextManager[None]:
    """A call that nobody measures."""
    return contextlib.nullcontext()


def trace_step(
    root: nn.Module,
    interceptor: Interceptor,
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    depth: TraceDepth,
    exchange: Exchange | None = None,
    keep_plain_state: bool = False,
    device: torch.device | None = None,
    position: Position | None = None,
    meter: Meter | None = None,
    snapshot: ModuleSnapshot | None = None,
    count_flops: bool = True,
) -> Trace:
    """Run the step once and record it. Afterwards everything is as it was before.

    Args:
        root: The user's module.
        interceptor: Catches the calls of its units.
        step: Called as ``step(*args, **kwargs)``.
        args: The step's positional arguments.
        kwargs: The step's keyword arguments.
        depth: How much is really computed.
        exchange: Runs units on their owners, for depth VALUES of a module that is spread over processes.
        device: Where parameters that have no memory yet will live.
        keep_plain_state: Leave state that holds no tensor as the run left it.
        position: Sets the global random generators as a replay does, so that glue which draws goes the same way.
        meter: Measures what calls of units do.
        snapshot: The state to come back to, where the caller took it right before; by default it is taken here.
        count_flops: Whether to count what units compute; it costs a fifth of a trace.

    Raises:
        PlaceholderReadError: At depth SHAPES, the step reads the value of an activation.
        Exception: Whatever the step itself raises.
    """
    tracer = _Tracer(
        root, interceptor, depth, exchange, position or _leave_generators, meter or _measure_nothing, count_flops
    )
    snapshot = snapshot or ModuleSnapshot(root)
    tracer.lent.generators = snapshot.generators_outside(interceptor.units)
    keep: list[str] = []
    try:
        with cured_afterwards(), _traced_parameters(root, tracer, depth, device):
            inputs = copy_containers((args, dict(kwargs)), _fresh_copy())
            tracer.watch_inputs(tensors_in(inputs))
            tracer.watch_state(snapshot.copies)
            with (
                interceptor.installed(),
                torch.compiler.set_stance("force_eager"),
                interceptor.policy(tracer),
            ):
                tracer.run(lambda: step(*inputs[0], **inputs[1]))
            trace = tracer.finish(snapshot)
            if keep_plain_state:
                keep = [name for name in trace.changed_state if not tensors_in(_attribute(root, name))]
            return trace
    finally:
        snapshot.restore(keep)


def _fresh_copy() -> Callable[[torch.Tensor], torch.Tensor]:
    copies: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            with torch.no_grad():
                copies[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return copies[id(tensor)]

    return copy


@contextlib.contextmanager
def _traced_parameters(
    root: nn.Module, tracer: _Tracer, depth: TraceDepth, device: torch.device | None
) -> Iterator[None]:
    """Mark where each parameter comes from; at depth SHAPES, put placeholders in the place of all of them."""
    replaced: list[tuple[nn.Module, str, nn.Parameter | None]] = []
    stand_ins: dict[int, Any] = {}
    for name, parameter in root.named_parameters():
        stand_in: torch.Tensor = parameter
        if depth is TraceDepth.SHAPES:
            stand_in = Placeholder.parameter(parameter, name, device)
        stand_ins[id(parameter)] = stand_in
        tracer.add_parameter(name, stand_in)
    if depth is TraceDepth.SHAPES:
        for module in root.modules():  # the snapshot puts the buffers back
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = Placeholder.like(buffer, name, device)
    try:
        for module in root.modules():
            for name, held in module._parameters.items():
                if held is not None and stand_ins.get(id(held), held) is not held:
                    replaced.append((module, name, held))
                    module._parameters[name] = stand_ins[id(held)]
        yield
    finally:
        for module, name, held in replaced:
            module._parameters[name] = held


class _Tracer:
    """The policy of a trace: run every unit, follow the glue between them."""

    def __init__(
        self,
        root: nn.Module,
        interceptor: Interceptor,
        depth: TraceDepth,
        exchange: Exchange | None,
        position: Position,
        meter: Meter,
        count_flops: bool,
    ) -> None:
        self._root = root
        self._interceptor = interceptor
        self._depth = depth
        self._exchange = exchange
        self._position = position
        self._meter = meter
        self._count_flops = count_flops
        self._provenance = Provenance()
        self._calls: list[UnitCall] = []
        self._numbers: dict[str, int] = {}
        self._tail: set[Source] = set()
        self._region: int | None = None
        self._num_regions = 0
        self._joined: list[frozenset[int]] = []
        self.lent = LentGenerators()
        self._random_at_entry = RandomState()

    def add_parameter(self, name: str, parameter: torch.Tensor) -> None:
        self._provenance.mark(parameter, {name})
        self._provenance.watch(parameter, ("parameter", name))

    def watch_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        for position, tensor in enumerate(tensors):
            self._provenance.watch(tensor, ("input", position))

    def watch_state(self, copies: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in copies.items():
            self._provenance.watch(tensor, ("state", name))

    def run(self, step: Callable[[], Any]) -> None:
        self._position(("torch", "python", "numpy"), "", 0)
        self._random_at_entry = RandomState()
        with self._provenance:
            result = step()
        self._tail |= self._provenance.sources(result)

    # -- CallPolicy -------------------------------------------------------------------------------------------------
    def call(
        self, unit: str, module: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        provenance = self._provenance
        if unit == DIFFERENTIATION:
            self._joined.append(self._calls_behind(args) | {len(self._calls)})
        refuse_inside_function(unit)
        needs = provenance.sources((args, kwargs)) | provenance.read
        cells = [provenance.cell(parameter) for parameter in module.parameters()]
        own = {id(cell) for cell in cells}
        for cell in cells:  # weights swapped in by functional_call are inputs too
            needs |= {s for s in cell.sources if isinstance(s, ValueId)}
        # a call may put further tensors into its arguments, such as a cache, and where it does not run they come later
        given = tensors_in((args, kwargs))
        result: list[Any] = []

        def run() -> ObservedCall:
            with self._meter(unit), self.lent.watching(unit):
                observed, value = self._observe(module, original, args, kwargs, own, given)
            result.append(value)
            return observed

        if self._exchange is None:
            observed = run()
        else:
            observed, _ = self._exchange(unit, run)
        number = len(self._calls)
        self._mark_values(number, observed, given)
        if not result:
            with _disable_current_modes():
                result.append(observed.effects.apply(module, (args, kwargs), observed.tensors.__getitem__, []))
        self._calls.append(self._record(unit, needs, observed))
        if observed.draws:
            self._position(observed.draws, unit, self._calls[-1].number)
        return result[0]

    def differentiates(self, outputs: Sequence[Output]) -> bool:
        return True

    def sink(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._tail |= self._provenance.sources((args, kwargs))
        if self._depth is TraceDepth.SHAPES:
            return Placeholder(_SCALAR, "a metric")
        with _disable_current_modes():
            return original(*args, **kwargs) if _is_metric(original) else None

    # -- parts ------------------------------------------------------------------------------------------------------
    def _calls_behind(self, args: tuple[Any, ...]) -> frozenset[int]:
        """The calls that a differentiation goes through."""
        outputs, inputs, sources = args[0], args[4], self._provenance.sources

        def holds(unit: str, names: frozenset[Source]) -> bool:
            module = self._interceptor.units.get(unit)
            return module is not None and bool(sources(list(module.parameters())) & names)

        return calls_between(self._calls, sources(outputs), [sources(tensor) for tensor in inputs], holds)

    def _observe(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        own: set[int],
        given: Sequence[torch.Tensor],
    ) -> tuple[ObservedCall, Any]:
        with _disable_current_modes():
            watch = Observation(module, (args, kwargs), version_of)
            before = RandomState()
            with HookRecorder(module) as hooks, counted_flops(self._count_flops) as flops, cheap_random_numbers():
                result = self._interceptor.run_inside(original, args, kwargs)
            effects, tensors = watch.finish(result, hooks)
            memory, shared = self._shared_memory(tensors, given, own)
            return ObservedCall(effects, tensors, before.drawn_since(), flops.total, memory, shared), result

    def _shared_memory(
        self, tensors: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], own: set[int]
    ) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
        cell = self._provenance.cell
        arguments = {id(cell(tensor)): position for position, tensor in enumerate(inputs)}
        cells = [id(cell(tensor)) for tensor in tensors]
        memory = tuple(cells.index(found) for found in cells)
        return memory, tuple(None if found in own else arguments.get(found) for found in cells)

    def _mark_values(self, call: int, observed: ObservedCall, arguments: Sequence[torch.Tensor]) -> None:
        provenance, tensors = self._provenance, observed.tensors
        for kind, key in observed.effects.written:
            if kind == "argument":
                provenance.note_overwritten(arguments[key])
        sources: dict[int, set[Source]] = {}
        for leaf, (memory, given) in enumerate(zip(observed.memory, observed.given, strict=True)):
            kept = provenance.cell(arguments[given]).sources if given is not None else frozenset[Source]()
            sources.setdefault(memory, set(kept)).add(ValueId(call, leaf))
        for leaf, tensor in enumerate(tensors):
            provenance.mark_value(tensor, ValueId(call, leaf), sources[observed.memory[leaf]])

    def _record(self, unit: str, needs: frozenset[Source], observed: ObservedCall) -> UnitCall:
        number = self._numbers.get(unit, 0)
        self._numbers[unit] = number + 1
        return UnitCall(
            unit=unit,
            number=number,
            needs=frozenset(s for s in needs if isinstance(s, ValueId)),
            raw_parameters=frozenset(s for s in needs if isinstance(s, str)),
            effects=observed.effects,
            values=tuple(spec_of(tensor) for tensor in observed.tensors),
            draws=observed.draws,
            region=self._region,
            flops=observed.flops,
        )

    @contextlib.contextmanager
    def region(self, function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        """An activation-checkpointed region; what lies inside it belongs to the outermost one."""
        outer = self._region
        if outer is None:
            self._region = self._num_regions
            self._num_regions += 1
        try:
            yield function
        finally:
            self._region = outer

    def finish(self, snapshot: ModuleSnapshot) -> Trace:
        changed = tuple(dict.fromkeys(snapshot.changed(self._interceptor.units)))
        provenance = self._provenance
        for name in changed:
            self._tail |= provenance.sources(_attribute(self._root, name))
        for (kind, name), sources in provenance.writes.items():
            if kind == "state" and name in changed:
                self._tail |= sources
        tail = self._tail | provenance.read
        drawn = frozenset().union(*(call.draws for call in self._calls)) | self._random_at_entry.drawn_since()
        return Trace(
            calls=tuple(self._calls),
            tail_needs=frozenset(s for s in tail if isinstance(s, ValueId)),
            tail_parameters=frozenset(s for s in tail if isinstance(s, str)),
            overwritten=frozenset(provenance.overwritten),
            entry_draws=drawn,
            changed_state=changed,
            written_parameters={n: s - {n} for (kind, n), s in provenance.writes.items() if kind == "parameter"},
            overwritten_inputs=frozenset(n for kind, n in provenance.writes if kind == "input"),
            joined=tuple(self._joined),
            lent_generators=tuple(sorted(self.lent.found)),
            shapes_follow_data=provenance.shapes_follow_data,
        )


_SCALAR = Geometry((), (), 0, torch.float32, torch.device("cpu"))


def _is_metric(method: Callable[..., Any]) -> bool:
    return isinstance(getattr(method, "__self__", None), nn.Module) and getattr(method, "__name__", "") != "log"


def _attribute(root: nn.Module, name: str) -> Any:
    path, _, attribute = name.rpartition(".")
    return getattr(root.get_submodule(path), attribute, None)
