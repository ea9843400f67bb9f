"""Running the user's own step on one stage.

Calls of the stage's own units run; all others answer with received values or placeholders, in the structure that the
trace recorded. After the last own call the run is cut, except on the stage that finishes the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from d9d_lightning.errors import PipelineError, PlaceholderReadError, StageError, UnplannedCallError
from d9d_lightning.partition.differentiation import Output
from d9d_lightning.partition.effects import HookRecorder
from d9d_lightning.partition.interception import Interceptor
from d9d_lightning.partition.placeholder import Placeholder, ReplayCut, is_placeholder, reads_end_the_replay
from d9d_lightning.partition.snapshot import RandomState
from d9d_lightning.partition.structure import copy_containers, tensors_in
from d9d_lightning.stage.answers import SCALAR, Answers
from d9d_lightning.stage.randomness import set_position
from d9d_lightning.stage.script import CallEntry, StageScript, describe_call
from d9d_lightning.stage.world import PrivateWorld
from d9d_lightning.values import Microbatch, ValueId

__all__ = ["Replay", "ReplayResult", "StepCall"]

StepCall = Callable[[Microbatch], Any]

_NO_STATE = contextlib.nullcontext()


@dataclass(slots=True)
class ReplayResult:
    """What one replay gives.

    Attributes:
        made: Values of this stage's units that later stages need, attached to the graph.
        output: What the user's step returned, on the stage that finishes it.
    """

    made: dict[ValueId, torch.Tensor] = field(default_factory=dict)
    output: Any = None


class Replay:
    """Runs the step on one stage, microbatch by microbatch.

    Args:
        root: The user's module.
        interceptor: Catches calls of its units; must be installed while replays run.
        script: What this stage does at each call.
        world: This stage's copy of the changing state, or None where nothing changes.
    """

    def __init__(
        self, root: nn.Module, interceptor: Interceptor, script: StageScript, world: PrivateWorld | None
    ) -> None:
        self._root = root
        self._interceptor = interceptor
        self.script = script
        self.world = world
        self._foreign = _find_foreign_parameters(root, script)

    def run(self, step: StepCall, microbatch: Microbatch, received: Mapping[ValueId, torch.Tensor]) -> ReplayResult:
        """Replay the step for one microbatch.

        Raises:
            UnplannedCallError: The step called units that the plan does not have, or in another order.
            PlaceholderReadError: The step read the value of another stage's tensor.
        """
        policy = _ReplayPolicy(self._interceptor, self.script, microbatch, received)
        draws = self.script.plan.trace.entry_draws
        random_state = RandomState() if draws else None
        private = _private_microbatch(microbatch, self.script.plan.trace.overwritten_inputs)
        try:
            changing = self.world is not None or self._foreign
            with self._own_state(policy) if changing else _NO_STATE, self._interceptor.policy(policy):
                if draws:
                    set_position(draws, microbatch.seed)
                policy.run(step, private)
        finally:
            if random_state is not None:
                random_state.restore()
        return policy.result

    @contextlib.contextmanager
    def _own_state(self, policy: _ReplayPolicy) -> Iterator[None]:
        for module, name, stand_in, _ in self._foreign:
            module._parameters[name] = stand_in
        before = self.world.content if self.world is not None else []
        try:
            with self.world.entered() if self.world is not None else contextlib.nullcontext():
                yield
            if self.world is not None and policy.was_cut:
                self.world.forget_unfinished(before)
        finally:
            for module, name, _, own in self._foreign:
                module._parameters[name] = own


def _find_foreign_parameters(
    root: nn.Module, script: StageScript
) -> list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]]:
    """Parameters that glue writes into, held by this process for another stage: here the write must not happen."""
    written = script.plan.trace.written_parameters
    if not written:
        return []
    names = {name for name in written if script.stage not in script.plan.shared.get(name, (_home(script, name),))}
    found = []
    wanted = {id(root.get_parameter(name)): name for name in names}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in wanted:
                stand_in = nn.Parameter(Placeholder.like(parameter.detach(), wanted[id(parameter)]), False)
                found.append((module, name, stand_in, parameter))
    return found


def _home(script: StageScript, name: str) -> int:
    units = script.plan.placement.unit_stage
    owner = max((u for u in units if name.startswith(f"{u}.")), key=len, default=None)
    return script.plan.placement.num_stages - 1 if owner is None else units[owner]


def _private_microbatch(microbatch: Microbatch, overwritten: frozenset[int]) -> Microbatch:
    change = None
    if overwritten:
        inputs = tensors_in((microbatch.args, dict(microbatch.kwargs)))
        marked = {id(inputs[position]) for position in overwritten if position < len(inputs)}

        def change(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone() if id(tensor) in marked else tensor

    args, kwargs = copy_containers((microbatch.args, dict(microbatch.kwargs)), change)
    return Microbatch(microbatch.index, microbatch.size, args, microbatch.seed, kwargs)


class _ReplayPolicy:
    """Answers the calls of one replay."""

    def __init__(
        self,
        interceptor: Interceptor,
        script: StageScript,
        microbatch: Microbatch,
        received: Mapping[ValueId, torch.Tensor],
    ) -> None:
        self._interceptor = interceptor
        self._script = script
        self._entries = script.entries
        self._microbatch = microbatch
        self._answers = Answers(interceptor, script, microbatch.seed, received)
        self._index = 0
        self._past_own_work = script.last_call < 0 and not script.is_loss_owner
        self.was_cut = False
        self.undo: list[Callable[[], None]] = []
        self.result = ReplayResult()

    def run(self, step: StepCall, microbatch: Microbatch) -> None:
        script = self._script
        try:
            if self._past_own_work:
                self._continue_on_placeholders(lambda: step(microbatch))
            else:
                output = step(microbatch)
                if script.is_loss_owner:
                    self._finish(output)
        except ReplayCut:
            self.was_cut = True
        except Exception as error:
            # Glue on placeholders may fail in its own ways; the stage that finishes the step tells whether it is wrong.
            if not self._past_own_work:
                self._blame_shapes(error)
                raise
            self.was_cut = True
        finally:
            self._leave_placeholder_mode()
            for restore in reversed(self.undo):
                restore()
        if self._index <= script.last_call:
            raise UnplannedCallError(
                f"the step ended after {self._index} unit calls; next in the plan is "
                + describe_call(self._entries[self._index])
            )

    def _blame_shapes(self, error: Exception) -> None:
        """Placeholders have the shapes of the traced batch; where those follow data, they may not fit this one."""
        if self._script.plan.trace.shapes_follow_data and not isinstance(error, PipelineError):
            raise UnplannedCallError(f"{type(error).__name__}: {error} (with the shapes of another batch)") from error

    def _finish(self, output: Any) -> None:
        if self._index != len(self._entries):
            raise UnplannedCallError(
                f"the step ended after {self._index} unit calls; the plan has {len(self._entries)}, "
                f"{describe_call(self._entries[self._index])} next"
            )
        self.result.output = output

    # -- CallPolicy -------------------------------------------------------------------------------------------------
    def call(
        self, unit: str, module: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        index = self._index
        if self._past_own_work and self._script.cut_inside_region and not self._script.runs_to_the_end:
            raise ReplayCut
        entry = self._entries[index] if index < len(self._entries) else None
        if entry is None or entry.unit != unit:
            raise UnplannedCallError(
                f"call {index} of the step is of unit {unit!r}; the plan has "
                + (describe_call(entry) if entry is not None else "no further call")
            )
        self._index = index + 1
        if entry.owned:
            return self._run(index, entry, module, original, args, kwargs)
        return self._answers.skip(entry, module, args, kwargs, self.undo)

    def differentiates(self, outputs: Sequence[Output]) -> bool:
        return True

    def sink(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._script.is_loss_owner:
            return original(*args, **kwargs)
        return Placeholder(SCALAR, "a metric")

    # -- parts ------------------------------------------------------------------------------------------------------
    def _run(
        self,
        index: int,
        entry: CallEntry,
        module: nn.Module,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if entry.effects.hooks:
            with HookRecorder(module) as hooks:
                result = self._interceptor.run_inside(original, args, kwargs)
            records = hooks.records
        else:
            result = self._interceptor.run_inside(original, args, kwargs)
            records = []
        if entry.draws:
            set_position(entry.draws, self._microbatch.seed, entry.unit, entry.number)
        if entry.bare and isinstance(result, torch.Tensor):
            tensors = [result]
        else:
            try:
                tensors = entry.effects.collect(result, module, (args, kwargs), records)
            except UnplannedCallError as error:
                raise UnplannedCallError(f"{describe_call(entry)}: {error}") from None
        for leaf, value, overwritten in entry.kept:
            tensor = tensors[leaf]
            if is_placeholder(tensor):
                raise _placeholder_given_error(entry, tensor)
            self.result.made[value] = tensor.clone() if overwritten else tensor
        if index == self._script.last_call and not self._script.is_loss_owner:
            self._end_of_own_work()
        return result

    def _end_of_own_work(self) -> None:
        self._past_own_work = True
        if self._script.runs_to_the_end:
            self._placeholder_mode = reads_end_the_replay()
            self._placeholder_mode.__enter__()
        elif not self._script.cut_inside_region:
            # Inside a checkpointed region the cut waits for the next call: the region must be left in the ordinary way.
            raise ReplayCut

    _placeholder_mode: contextlib.AbstractContextManager[None] | None = None

    def _leave_placeholder_mode(self) -> None:
        if self._placeholder_mode is not None:
            self._placeholder_mode.__exit__(None, None, None)
            self._placeholder_mode = None

    def _continue_on_placeholders(self, step: Callable[[], Any]) -> None:
        with reads_end_the_replay():
            step()

    # -- RegionPolicy -----------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def region(self, function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        """A checkpointed region runs again in the backward pass: its calls are then answered as they are now."""
        answers, start = self._answers, self._index

        def again(*args: Any, **kwargs: Any) -> None:
            answers.repeat(start, lambda: function(*args, **kwargs))

        yield again


def _placeholder_given_error(entry: CallEntry, tensor: Any) -> StageError:
    return PlaceholderReadError(
        f"{describe_call(entry)} was given a tensor of {tensor.origin!r}, which lives on another stage and was not in "
        "the trace. Expected: what a unit reads depends on the batch's structure only. Name both as one unit with "
        "units=[...], or keep them on one stage with split_points=[...] in D9DStrategy."
    )
