"""This rank's stages of one module, and how a batch runs over them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from d9d_lightning.errors import PartitionError, PipelineError, PlaceholderReadError, UnplannedCallError
from d9d_lightning.partition.units import parameter_owners
from d9d_lightning.runtime.agreement import Agreement
from d9d_lightning.runtime.commitment import Commitment, StepObserver
from d9d_lightning.runtime.executor import Monitor, PipelineExecutor
from d9d_lightning.runtime.exhaustion import explain_exhaustion, is_exhaustion
from d9d_lightning.runtime.fallbacks import FallbackNews, describe_fallbacks
from d9d_lightning.runtime.gradient_backup import GradientBackup
from d9d_lightning.runtime.groups import PipelineGroups
from d9d_lightning.runtime.materialize import materialize
from d9d_lightning.runtime.ownership import (
    Ownership,
    check_homes,
    check_program,
    find_ownership,
    lent_parameters,
    release_parameters,
)
from d9d_lightning.runtime.pretrained import PretrainedWeights
from d9d_lightning.runtime.recorder import StepRecorder
from d9d_lightning.runtime.solitary import NoTransport
from d9d_lightning.runtime.state_sharing import share_state
from d9d_lightning.runtime.together import run_together
from d9d_lightning.runtime.transport import ProcessTransport
from d9d_lightning.runtime.whereabouts import place_of_failure
from d9d_lightning.schedule import Program
from d9d_lightning.stage.lockstep import LockstepExchange, LockstepPolicy
from d9d_lightning.stage.planner import Planner
from d9d_lightning.stage.recomputation import Recomputation, find_recomputed, matching_modules
from d9d_lightning.stage.replay import Replay, StepCall
from d9d_lightning.stage.script import StageScript, make_script
from d9d_lightning.stage.stage import Finish, PipelineStage
from d9d_lightning.stage.world import PrivateWorld
from d9d_lightning.values import Microbatch, Placement, Plan, StepStatus

__all__ = ["Pipeline", "StepOutcome"]


@dataclass(frozen=True)
class StepOutcome:
    """What one batch gave.

    Attributes:
        outputs: On the loss owner, what the step returned for each microbatch; None elsewhere.
        lockstep: Whether the step ran in lockstep instead of as a pipeline.
    """

    outputs: list[Any] | None
    lockstep: bool = False


class Pipeline:
    """This rank's part of a pipeline.

    Args:
        module: The user's module.
        stage_to_rank: Pipeline rank of every stage.
        rank: This pipeline rank.
        size: Number of pipeline ranks.
        groups: Process groups; None where one process has all stages.
        units: Names or patterns of units, where the user chooses.
        split_points: Units that stages begin with, where the user chooses.
        sinks: ``(object, method name)`` of methods that only take values out of the step.
        silenced: Modules whose state a trace need not restore (metrics).
        device: Device of this rank.
        recomputed: Modules that run again in the backward pass; see ``matching_modules``.

    Attributes:
        monitor: Told which action runs.
        optimizer_states: Gives the tensors that optimizers keep, for an error that says what was held.
        recorder: Notes when each action of a training step begins and ends.
        planner: Traces and plans.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        stage_to_rank: Sequence[int],
        rank: int,
        size: int,
        groups: PipelineGroups | None = None,
        units: Sequence[str] | None = None,
        split_points: Sequence[str] | None = None,
        sinks: Sequence[tuple[Any, str]] = (),
        silenced: Sequence[nn.Module] = (),
        device: torch.device | str = "cpu",
        recomputed: Any = None,
    ) -> None:
        if size > 1 and groups is None:
            raise PipelineError(f"a pipeline of {size} ranks needs groups; give PipelineGroups, or size=1")
        self.module = module
        self.stage_to_rank = tuple(stage_to_rank)
        self.rank = rank
        self.size = size
        self.loss_owner = self.stage_to_rank[-1]
        self.is_loss_owner = rank == self.loss_owner
        self.planner = Planner(module, sinks, silenced, units, split_points, torch.device(device))
        self._groups = groups
        self._agreement = Agreement(groups, rank)
        if groups is not None:
            self.planner.agree = lambda failed: any(groups.gather(failed))
        self._device = torch.device(device)
        self._transport = None if groups is None else ProcessTransport(groups, self.stage_to_rank, self._device)
        self.monitor: Monitor | None = None
        self.optimizer_states: Callable[[], Iterable[Tensor]] = tuple
        self.recorder = StepRecorder(rank)
        self._recomputed = recomputed
        self._recomputation = Recomputation({})
        self._ownership: Ownership | None = None
        self._scripts: dict[tuple[str, int, bool], StageScript] = {}
        self._lockstep_kinds: set[str] = set()
        self._fallbacks = FallbackNews()

    # ---- who has what ----------------------------------------------------------------------------------------------
    @property
    def _owners(self) -> Ownership:
        if self._ownership is None:
            raise PartitionError("the module has no placement yet; call place() first")
        return self._ownership

    @property
    def parameter_owners(self) -> Mapping[str, tuple[int, ...]]:
        """Pipeline ranks that hold each parameter; the first one saves and counts it."""
        return self._owners.parameters

    @property
    def parameter_stages(self) -> Mapping[str, tuple[int, ...]]:
        """Stages that use each parameter, in any batch so far."""
        return self._owners.stages

    @property
    def buffer_owners(self) -> Mapping[str, int]:
        """Pipeline rank that updates each buffer."""
        return self._owners.buffers

    @property
    def owned_parameters(self) -> Mapping[str, nn.Parameter]:
        """This rank's parameters by qualified name, shared ones included."""
        owners = self._owners.parameters
        return {name: p for name, p in self.module.named_parameters() if self.rank in owners[name]}

    @functools.cached_property
    def _trained(self) -> list[nn.Parameter]:
        return list(self.owned_parameters.values())

    @property
    def own_stages(self) -> tuple[int, ...]:
        """Stages of this rank."""
        return tuple(stage for stage, rank in enumerate(self.stage_to_rank) if rank == self.rank)

    def place(self, step: StepCall, microbatches: Sequence[Microbatch], kind: str = "training_step") -> Placement:
        """Fix the placement, from one microbatch; collective.

        Args:
            step: Calls the user's step.
            microbatches: Slices of one batch; none where no batch can be had, and then the order of registration
                stands for the order of calls.
            kind: Name of the user's step.

        Raises:
            PartitionError: The step cannot be cut, or the ranks found different units.
        """
        placement: Placement | None = None
        error: Exception | None = None
        try:
            if microbatches:
                placement = self.planner.place(step, microbatches[0], self.stage_to_rank)
            else:
                placement = self.planner.place_by_registration(self.stage_to_rank)
            trace = self.planner.setup_trace
            self._ownership = find_ownership(self.module, self.planner.units, trace, placement, self.stage_to_rank)
            for described in self.planner.describe(kind, microbatches):  # while the whole module is here
                self.planner.plan(step, described)
            if self._recomputed is not None:
                chosen = matching_modules(self.module, self._recomputed)
                self._recomputation = Recomputation(find_recomputed(self.module, self.planner.units, chosen))
        except Exception as problem:
            error = problem
        with self._agreement.with_replicas():
            units = repr(sorted(placement.unit_stage.items())) if placement else ""
            self._agreement.compare("placement", units, error)
        if placement is None:
            raise PartitionError("the module could not be placed")
        return placement

    def release(self, seed: int = 0, given: Collection[str] = (), pretrained: PretrainedWeights | None = None) -> None:
        """Give up the parameters of other ranks: placeholders of the same names take their place.

        What this rank owns of a module built on the meta device gets memory and values; see ``materialize``.

        Args:
            seed: Seed of the run.
            given: Names of what a checkpoint is about to fill.
            pretrained: Files that fill what no checkpoint does.

        Raises:
            PartitionError: Nothing fills a parameter or buffer of a module built on the meta device.
        """
        owned = self.owned_parameters.keys()
        materialize(self.module, owned, self._device, seed=seed, given=given, pretrained=pretrained)
        if self.size > 1:
            release_parameters(self.module, self._owners, self.rank, self._device)
            self.planner.refresh()
            self.planner.exchange = self._exchange()
            self.planner.lend = self._lend

    # ---- running ---------------------------------------------------------------------------------------------------
    def run(
        self,
        step: StepCall,
        microbatches: Sequence[Microbatch],
        program: Program,
        *,
        finish: Finish,
        observer: StepObserver | None = None,
        restart: Callable[[], None] | None = None,
        training: bool = True,
        kind: str = "training_step",
    ) -> StepOutcome:
        """Run one batch; collective over the pipeline.

        Args:
            step: Calls the user's step for one microbatch.
            microbatches: The slices of the batch.
            program: What every rank does; its placement of stages must be this pipeline's.
            finish: Called on the loss owner when a step has ended, gives the scalar to differentiate.
            observer: Told of progress.
            restart: Called before the batch runs again, because the step met a call that the plan does not have; what
                ``finish`` and the step left behind must be dropped.
            training: Whether gradients are computed. In evaluation a step that reads activations runs in lockstep.
            kind: Name of the user's step.

        Raises:
            RankFailedError: Another rank failed; its error and traceback are shown.
            Exception: The first failure of this rank's own stages.
        """
        check_program(program, self.stage_to_rank)
        with self._agreement.with_replicas():
            return self._run(step, microbatches, program, finish, observer, restart, training, kind)

    def is_common(self, error: BaseException) -> bool:
        """Whether an error of :meth:`run` was raised on all ranks, those of replicas included, for the same reason."""
        return self._agreement.is_common(error)

    def _run(
        self,
        step: StepCall,
        microbatches: Sequence[Microbatch],
        program: Program,
        finish: Finish,
        observer: StepObserver | None,
        restart: Callable[[], None] | None,
        training: bool,
        kind: str,
    ) -> StepOutcome:
        if not training and kind in self._lockstep_kinds:
            return self._run_in_lockstep(step, microbatches, finish)
        backup = GradientBackup(self._trained) if training else None
        try:
            plans = self._plans(kind, step, microbatches, fresh=False)
            outcome = self._run_once(step, microbatches, program, plans, finish, observer, fresh=False)
            if outcome is None:
                if backup is not None:
                    backup.undo()
                if restart is not None:
                    restart()
                plans = self._plans(kind, step, microbatches, fresh=True)
                outcome = self._run_once(step, microbatches, program, plans, finish, observer, fresh=True)
        except (PlaceholderReadError, PartitionError):
            if training:
                raise
            self._lockstep_kinds.add(kind)
            if restart is not None:
                restart()
            return self._run_in_lockstep(step, microbatches, finish)
        if outcome is None:
            raise UnplannedCallError("the step calls its units in another order each time it runs on the same batch")
        return outcome

    def _plans(self, kind: str, step: StepCall, microbatches: Sequence[Microbatch], fresh: bool) -> list[Plan]:
        described = self.planner.describe(kind, microbatches)
        missing = fresh or not all(map(self.planner.knows, described))
        missing = self._agreement.before(described, missing)
        plans: list[Plan] = []
        error: Exception | None = None
        try:
            for microbatch in described:
                plans.append(self.planner.plan(step, microbatch, fresh=fresh))
            if missing:
                for plan in plans:
                    check_homes(self.module, self.planner.units, plan, self._owners, self.stage_to_rank)
        except Exception as problem:
            error = problem
        if missing:
            self._agreement.compare("plan", ",".join(plan.digest for plan in plans), error, self.monitor)
        elif error is not None:
            raise error
        return plans

    def _run_once(
        self,
        step: StepCall,
        microbatches: Sequence[Microbatch],
        program: Program,
        plans: list[Plan],
        finish: Finish,
        observer: StepObserver | None,
        fresh: bool,
    ) -> StepOutcome | None:
        outputs: list[Any] = [None] * len(microbatches)

        def keep(microbatch: Microbatch, output: Any) -> Tensor | None:
            outputs[microbatch.index] = output
            return finish(microbatch, output)

        names = tuple(dict.fromkeys(name for plan in plans for name in plan.trace.changed_state))
        worlds = {stage: PrivateWorld(self.module, names) if names else None for stage in self.own_stages}
        stages = {
            stage: PipelineStage(stage, self._replays(plans, stage, worlds[stage]), step, microbatches, keep)
            for stage in self.own_stages
        }
        told = None if observer is None else Commitment(observer, self._groups, len(microbatches))
        moving = NoTransport() if self._transport is None else self._transport.begin(plans)
        executor = PipelineExecutor(self.rank, program, stages, self.recorder.begin(moving, self.monitor), told)
        with self._recomputation.installed(), self.planner.interceptor.installed():
            executor.run(self.recorder)
        status = self._settle(executor, fresh, stages.values())
        if status is StepStatus.UNPLANNED:
            return None
        self.recorder.end(program)
        if names:
            share_state(self.module, names, worlds.get(program.num_stages - 1), self._groups, self.loss_owner)
        return StepOutcome(outputs if self.is_loss_owner else None)

    def _replays(self, plans: Sequence[Plan], stage: int, world: PrivateWorld | None) -> list[Replay]:
        replays: dict[int, Replay] = {}
        for plan in plans:
            if id(plan) not in replays:
                key = (plan.digest, stage, torch.is_grad_enabled())
                if key not in self._scripts:
                    self._scripts[key] = make_script(plan, stage)
                replays[id(plan)] = Replay(self.module, self.planner.interceptor, self._scripts[key], world)
        return [replays[id(plan)] for plan in plans]

    def _settle(self, executor: PipelineExecutor, fresh: bool, stages: Iterable[PipelineStage]) -> StepStatus:
        failure = executor.failure
        unplanned = isinstance(failure, UnplannedCallError | PlaceholderReadError) and not fresh
        status = StepStatus.UNPLANNED if unplanned else StepStatus.FINE if failure is None else StepStatus.FAILED
        status, fallbacks = self._agreement.after(status, self._fallbacks.find(stages))
        self.planner.notes.extend(describe_fallbacks(fallbacks))
        if status is not StepStatus.FINE and self._transport is not None:
            self._transport.reset()
        if status is StepStatus.FAILED:
            where = "" if failure is None else place_of_failure(f"action {executor.failed_action}", failure)
            if failure is not None and is_exhaustion(failure):
                explain_exhaustion(failure, where, self._trained, self.optimizer_states(), stages)
            self._agreement.raise_first(failure, where, executor.failed_at)
        return status

    def _lend(self) -> AbstractContextManager[None]:
        if self._groups is None:
            return nullcontext()
        trace = self.planner.setup_trace
        read = set(trace.tail_parameters).union(*(call.raw_parameters for call in trace.calls))
        loose = {name for name, unit in parameter_owners(self.module, self.planner.units).items() if unit is None}
        return lent_parameters(self.module, sorted(read | loose), self._owners, self.rank, self._groups)

    # ---- lockstep --------------------------------------------------------------------------------------------------
    def _exchange(self) -> LockstepExchange:
        groups, placement = self._groups, self.planner.placement
        if groups is None or placement is None:
            raise PartitionError("lockstep needs a placed pipeline of several ranks")
        share: Callable[..., Any] = lambda value, source: groups.broadcast(value, source, lockstep=True)  # noqa: E731
        return LockstepExchange(placement, self.stage_to_rank, self.rank, share)

    def _run_in_lockstep(self, step: StepCall, microbatches: Sequence[Microbatch], finish: Finish) -> StepOutcome:
        if self._groups is None:
            outputs = [step(microbatch) for microbatch in microbatches]
        else:
            policy = LockstepPolicy(self.planner.interceptor, self._exchange(), self.is_loss_owner)
            with self._lend(), self.planner.interceptor.installed(), self.planner.interceptor.policy(policy):
                outputs = run_together(lambda: list(map(step, microbatches)), self._agreement, self.monitor)
        if self.is_loss_owner:
            for microbatch, output in zip(microbatches, outputs, strict=True):
                finish(microbatch, output)
        return StepOutcome(outputs if self.is_loss_owner else None, lockstep=True)
