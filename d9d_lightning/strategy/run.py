"""One run of a trainer: the parts that ``D9DStrategy`` made for it, and how they hang on the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from d9d_lightning.errors import PipelineError
from d9d_lightning.runtime.pretrained import PretrainedWeights
from d9d_lightning.strategy import checkpoint as checkpoints
from d9d_lightning.strategy.assembly import (
    SharedGroup,
    agree_on_values,
    agreed_seed,
    make_messenger,
    norm_weights,
    place_module,
    shared_groups,
)
from d9d_lightning.strategy.callbacks import CallbackAdapters
from d9d_lightning.strategy.clip import bind_clipping
from d9d_lightning.strategy.compat import is_overridden
from d9d_lightning.strategy.disagreement import compare_setups, describe_setup
from d9d_lightning.strategy.epochs import EpochEnds
from d9d_lightning.strategy.evaluation import EvaluationSteps
from d9d_lightning.strategy.failures import RunWatch
from d9d_lightning.strategy.hooks import HookWrappers
from d9d_lightning.strategy.keys import KeyAgreement
from d9d_lightning.strategy.loaders import wrap_loader
from d9d_lightning.strategy.logbook import install_logbooks
from d9d_lightning.strategy.loop import install_loop
from d9d_lightning.strategy.measured import MeasuredSteps, Replanner
from d9d_lightning.strategy.meeting import Meeting, MissingRanksError
from d9d_lightning.strategy.metrics import bind_metrics
from d9d_lightning.strategy.options import StrategyOptions
from d9d_lightning.strategy.outside import Around, OutsideCalls
from d9d_lightning.strategy.owned_optimizer import OwnedOptimizer
from d9d_lightning.strategy.placement import PlacedModule, find_placed
from d9d_lightning.strategy.precision import prepare_scaler
from d9d_lightning.strategy.programs import Programs
from d9d_lightning.strategy.reduction import GradientReduction
from d9d_lightning.strategy.refusals import refuse_module, refuse_optimizers
from d9d_lightning.strategy.report import describe_run
from d9d_lightning.strategy.restoring import PendingState, load_pending
from d9d_lightning.strategy.runtime_bridge import runtime_groups
from d9d_lightning.strategy.session import Session
from d9d_lightning.strategy.sharded import write_sharded
from d9d_lightning.strategy.signals import StopSignals
from d9d_lightning.strategy.stepping import StepAgreement
from d9d_lightning.strategy.training import TrainingSteps
from d9d_lightning.strategy.whole import whole_module
from d9d_lightning.strategy.witness import DROPPING_HOOKS, GradientWitness
from d9d_lightning.strategy.world import World, next_number

__all__ = ["Run"]

INTERRUPTED_WAIT_SECONDS = 5.0


class Run:
    """See the module. Made in ``setup``; its connections end with ``teardown``.

    Args:
        trainer: The trainer.
        module: The user's module.
        options: Checked arguments of the strategy.
        world: The processes.
        device: Device of this process.
        reduce: How ``sync_dist`` reduces.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        options: StrategyOptions,
        world: World,
        device: torch.device,
        reduce: Callable[..., Any],
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._options = options
        self._world = world
        self._device = device
        self._reduce = reduce
        self._programs = Programs(options.schedule, world.axes.pipeline)
        self._messenger = make_messenger(world, self._programs, device)
        self._hooks = HookWrappers(module, options.owner_only_hooks)
        self._epochs = EpochEnds(trainer, module, self._messenger, eager=world.axes.data > 1)
        self._callbacks = CallbackAdapters(
            trainer, module, is_first=not any(astuple(world.position)), is_split=world.axes.pipeline > 1
        )
        self._signals = StopSignals(trainer, world.groups.world_control if world.groups is not None else None)
        self.meeting = Meeting(world.axes.world, f"run{next_number(world, 'run')}")
        self._optimizers: dict[int, OwnedOptimizer] = {}
        self._placed: PlacedModule | None = None
        self._told = 0
        self._shared: Sequence[SharedGroup] = ()
        self._reduction: GradientReduction | None = None
        self._training: TrainingSteps | None = None
        self._evaluation: EvaluationSteps | None = None
        self.measured: MeasuredSteps | None = None
        refuse_module(module, trainer)

    # ---- parts -----------------------------------------------------------------------------------------------------

    @property
    def is_placed(self) -> bool:
        """Whether an earlier run has placed the module."""
        return self.find_placed() is not None

    def find_placed(self) -> PlacedModule | None:
        """The module's placement, where there is one."""
        return find_placed(self._module, self._programs.size, self._programs.stage_to_rank)

    @property
    def placed(self) -> PlacedModule:
        """The module's placement."""
        if self._placed is None:
            raise PipelineError("the module has no place yet; strategy.setup gives it one")
        return self._placed

    @property
    def training(self) -> TrainingSteps:
        """Runs training batches."""
        if self._training is None:
            raise PipelineError("training steps exist between setup and teardown of Trainer.fit only")
        return self._training

    @property
    def owned(self) -> Mapping[str, nn.Parameter]:
        """This rank's parameters."""
        return self.placed.engine.owned_parameters

    # ---- setup -----------------------------------------------------------------------------------------------------

    def wrap_loader(self, loader: Any) -> Any:
        """Loader that gives all ranks the same number of batches; collective."""
        groups = self._world.groups
        world = groups.world_control if groups is not None else None
        return wrap_loader(loader, self._messenger, world, broadcast=self._options.broadcast_batches)

    def place(self, optimizers: Sequence[Optimizer], pending: PendingState | None = None) -> None:
        """Give this rank its part of the module and of the optimizers; collective the first time.

        Args:
            optimizers: The user's.
            pending: What a checkpoint has for the module, loaded as soon as it is placed.
        """
        refuse_optimizers(self._module, optimizers, self._world.axes.data)
        known = self.is_placed
        if not known:
            groups = self._world.groups
            setup = describe_setup(self._options, self._module, optimizers)
            compare_setups(setup, groups.world_control if groups is not None else None)
        for optimizer in optimizers:
            self._optimizers[id(optimizer)] = OwnedOptimizer(optimizer, self._module)
        self._placed = place_module(
            self._trainer, self._module, self._options, self._world, self._programs, self._messenger
        )
        shared = shared_groups(self._world, self._programs, self._placed.engine.parameter_owners)
        if not known:
            agree_on_values(self._module, self._placed.ownership, self._world, shared)
        for owned_optimizer in self._optimizers.values():
            owned_optimizer.prune(self.owned)
        self._fill(pending, None if known else self._options.pretrained_weights)
        if known:
            self._told = len(self.placed.engine.planner.notes)
        elif self._programs.size > 1:
            rank_zero_info(describe_run(self._module, self.placed, self._programs, self._options.num_microbatches))
        self.tell()
        self._shared = shared

    def _fill(self, pending: PendingState | None, paths: Mapping[str, str] | None) -> None:
        """Give up what others own, and give values to the rest."""
        pretrained = None if paths is None else PretrainedWeights(self._module, paths)
        given = () if pending is None else checkpoints.names_given(self._module, pending.state)
        self.placed.engine.release(agreed_seed(self._messenger), given, pretrained)
        if pending is not None:
            load_pending(self._module, pending)
        for note in () if pretrained is None else pretrained.notes:
            rank_zero_warn(note)

    def tell(self) -> None:
        """Say what has turned up since the last time about how steps are traced and computed."""
        notes = self.placed.engine.planner.notes
        for note in notes[self._told :]:
            rank_zero_info(f"D9DStrategy: {note}")
        self._told = len(notes)

    def connect(self, precision: Precision, watch: RunWatch | None = None) -> None:
        """Hang loops, logs, metrics, hooks and signals on the trainer, and the failure watch on the pipeline."""
        groups = self._world.groups
        self.placed.engine.monitor = watch
        optimizers = self._optimizers.values()
        self.placed.engine.optimizer_states = lambda: [t for optimizer in optimizers for t in optimizer.state_tensors]
        self._signals.install()
        replicas = groups.data_gradients if groups is not None and self._world.axes.data > 1 else None
        session = Session(
            self._trainer,
            self._module,
            precision,
            self._options,
            self.placed.engine,
            self._programs,
            self._messenger,
            agreed_seed(self._messenger),
            self._world.position.data,
            self._world.axes.data,
        )
        stages = self.placed.engine.parameter_stages
        self._reduction = GradientReduction(self.owned, stages, self._shared, replicas, self._options)
        self.measured = MeasuredSteps(self.placed.engine.recorder, runtime_groups(self._world, self._programs))
        replanner = Replanner(self._programs, self.measured, groups.world_control if groups is not None else None)
        control = groups.pipeline_control if groups is not None and self._world.axes.pipeline > 1 else None
        witness = GradientWitness(self.owned, control, lambda: any(map(session.someone_reads, DROPPING_HOOKS)))
        self._training = TrainingSteps(session, self._reduction, witness, replanner)
        self._evaluation = EvaluationSteps(session)
        world_group = torch.distributed.group.WORLD if groups is not None else None
        prepare_scaler(precision, self._device, world_group)
        rank = self._world.pipeline_rank(self._programs.loss_owner)
        world_control = groups.world_control if groups is not None else None
        agreement = StepAgreement(world_control, lambda: is_overridden("optimizer_step", self._module))
        bind_clipping(
            precision,
            group=groups.pipeline_lockstep if groups is not None and self._world.axes.pipeline > 1 else None,
            weights=norm_weights(self.placed.engine, self.owned, rank),
            device=self._device,
            before_hooks=agreement.step,
            before_step=(witness.compare, self._reduction.lower_gradients),
        )
        bind_metrics(self._module, groups.data_metrics if groups is not None and self._world.axes.data > 1 else None)
        install_loop(self._trainer, agreement)
        keys = KeyAgreement(groups.world_control) if groups is not None and self._world.axes.data > 1 else None
        install_logbooks(self._trainer, self._reduce, None if keys is None else keys.check)
        around = self._calls_outside()
        self._hooks.install(self._trainer, self._messenger, around)
        self._callbacks.install(around)
        self._epochs.install()
        for loop in (self._trainer.validate_loop, self._trainer.test_loop, self._trainer.predict_loop):
            # tensors made in inference mode cannot be used by a later fit
            loop.inference_mode = False

    def _calls_outside(self) -> Around:
        groups = runtime_groups(self._world, self._programs)
        if groups is None:
            return nullcontext
        return OutsideCalls(self.placed.engine, groups, self.placed.placement, self.meeting).allowed

    def disconnect(self) -> None:
        """Give the trainer and the module their own hooks back."""
        self._signals.remove()
        if self._placed is not None:
            self._placed.engine.monitor = None
            self._placed.engine.optimizer_states = tuple
        self._hooks.remove()
        self._callbacks.remove()
        if self._reduction is not None:
            self._reduction.close()
            self._reduction = None
        self._epochs.remove()

    # ---- steps and checkpoints -------------------------------------------------------------------------------------

    def evaluate(self, step_name: str, args: tuple[Any, ...]) -> Any:
        """Run one evaluation batch."""
        if self._evaluation is None:
            raise PipelineError("evaluation steps exist between setup and teardown only")
        self._signals.agree()
        dataloader = args[2] if len(args) > 2 and isinstance(args[2], int) else 0
        return self._evaluation.run(step_name, args, dataloader)

    def local_state_dict(self) -> dict[str, Any]:
        """This rank's part of the state dict."""
        return checkpoints.local_state_dict(self._module, self.placed.ownership, self._messenger.is_source)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's part of the optimizer state, under global ids."""
        return self._optimizers[id(optimizer)].state()

    def load_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a whole optimizer state."""
        self._optimizers[id(optimizer)].load(state)

    def _complete(self, checkpoint: MutableMapping[str, Any]) -> None:
        """Take from the checkpoint what other ranks save, and put in what concerns all of them."""
        for key in checkpoints.NAMED_PARTS:
            if key in checkpoint:
                # hooks may have put other tensors under the same names, such as averages of the whole module
                checkpoint[key] = checkpoints.own_entries(
                    checkpoint[key], self._module, self.placed.ownership, self._messenger.is_source
                )
        self._callbacks.complete(checkpoint, [one.group_names for one in self._optimizers.values()])

    def meet_for_checkpoint(self, path: Any) -> bool:
        """Whether all ranks are there to save; after a failure only those are that failed together.

        Raises:
            MissingRanksError: Without a failure, some ranks do not call it.
        """
        what = "Trainer.save_checkpoint"
        if not self._trainer.interrupted:
            self.meeting.attend(what)
            return True
        try:
            self.meeting.attend(what, seconds=INTERRUPTED_WAIT_SECONDS)
        except MissingRanksError:
            rank_zero_warn(
                f"no checkpoint was written to {path}: the run has failed on this rank, and the parameters of the "
                "other ranks cannot be had any more. The last checkpoint is still there."
            )
            return False
        return True

    def gather(self, checkpoint: MutableMapping[str, Any], path: Any) -> None:
        """Bring the parts of this pipeline to its first process; collective."""
        groups = self._world.groups
        if groups is None or self._world.axes.pipeline == 1 or self._world.position.data:
            return
        self._complete(checkpoint)
        directory = Path(path).parent
        checkpoints.gather_checkpoint(
            checkpoint,
            order=self.placed.names,
            process=self._world.position.pipeline,
            processes=groups.processes,
            group=groups.pipeline_control,
            spool=directory if directory.is_dir() else None,
        )

    def write_sharded(self, checkpoint: MutableMapping[str, Any], path: Any) -> None:
        """Write a directory with the parts of the first replica; collective."""
        groups = self._world.groups
        if groups is not None and self._world.position.data:
            return
        self._complete(checkpoint)
        write_sharded(
            checkpoint,
            path,
            [one.layout for one in self._optimizers.values()],
            group=groups.pipeline_control if groups is not None and self._world.axes.pipeline > 1 else None,
            is_first=not any(astuple(self._world.position)),
        )

    @contextmanager
    def whole(self) -> Iterator[LightningModule]:
        """The whole module; collective."""
        groups = self._world.groups
        owner = self._programs.loss_owner
        with whole_module(
            self._module,
            self.placed.ownership,
            process_of=lambda rank: self._world.process_of(rank, owner),
            group=groups.pipeline_lockstep if groups is not None and self._world.axes.pipeline > 1 else None,
            device=self._device,
        ):
            yield self._module
