"""``D9DStrategy``: the hooks of a Lightning strategy, in the order in which a trainer calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from d9d_lightning.errors import PipelineError, PipelineStateError
from d9d_lightning.runtime.step_report import StepReport
from d9d_lightning.schedule import PipelineProgramBuilder
from d9d_lightning.strategy import compat
from d9d_lightning.strategy.averaging import trained_state
from d9d_lightning.strategy.collectives import Collectives
from d9d_lightning.strategy.explain import Explained
from d9d_lightning.strategy.failures import RunWatch
from d9d_lightning.strategy.files import read_checkpoint, remove_checkpoint, write_checkpoint
from d9d_lightning.strategy.launch import make_launcher
from d9d_lightning.strategy.options import StrategyOptions, check_options
from d9d_lightning.strategy.refusals import refuse_module, several_optimizers_refused
from d9d_lightning.strategy.restoring import PendingState, restore_module
from d9d_lightning.strategy.run import Run
from d9d_lightning.strategy.world import World, join_world, leave_world

__all__ = ["D9DStrategy"]

compat.check_versions()
compat.explain_mixed_packages()


class D9DStrategy(Explained, ParallelStrategy):
    """Trains an ordinary LightningModule across a pipeline of processes.

    >>> strategy = D9DStrategy(schedule="zbv", num_microbatches=8)

    Args:
        schedule: Name of a schedule, or a ``PipelineProgramBuilder`` of your own.
        pipeline_parallel_size: Number of pipeline ranks; ``"auto"``: all processes that the other axes leave over.
        data_parallel_size: Number of replicas of the pipeline.
        tensor_parallel_size: Reserved; 1.
        num_microbatches: Into how many microbatches a batch is split; ``"auto"`` chooses by the predicted bubble.
        batch_spec: How fields of the batch are split, where that cannot be read from the batch.
        example_batch: A batch to plan with, where the loader cannot give one without being consumed.
        units: Patterns of the modules that are placed whole, such as ``["net.blocks.*"]``.
        split_points: Names of the units that begin a stage.
        owner_only_hooks: Hooks of the module that run on the loss owner alone.
        bucket_size_mb: Size of gradient buckets in data-parallel training, in megabytes.
        gradient_dtype: Element type of gradient reduction; the parameter's own by default.
        save_distributed_checkpoint: Save a directory with a part per process instead of one file.
        broadcast_batches: Load batches on one rank of each pipeline and send them to the others.
        process_group_backend: Backend of process groups; by default the usual one of the device.
        timeout: How long a collective may wait, as a timedelta or in seconds.
        start_method: ``"popen"`` runs the script again, ``"spawn"``, ``"fork"`` and ``"forkserver"`` start workers.
        activation_checkpointing: A class of modules, or a list of them, that run again in the backward pass.
        activation_checkpointing_policy: The same as a set of classes, or as a policy in the form of torch's FSDP.
        pretrained_weights: A safetensors file or directory for the module, or one for each named submodule.

    Raises:
        PipelineConfigurationError: An argument is not allowed; the message says what is.
    """

    def __init__(
        self,
        schedule: str | PipelineProgramBuilder = "zbv",
        pipeline_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        num_microbatches: int | Literal["auto"] = "auto",
        batch_spec: Any = None,
        example_batch: Any = None,
        units: Sequence[str] | None = None,
        split_points: Sequence[str] | None = None,
        owner_only_hooks: Sequence[str] = (),
        bucket_size_mb: float = 25,
        gradient_dtype: str | torch.dtype | None = None,
        save_distributed_checkpoint: bool = False,
        broadcast_batches: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | float = compat.default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        activation_checkpointing: type[nn.Module] | list[type[nn.Module]] | None = None,
        activation_checkpointing_policy: set[type[nn.Module]] | Callable[..., bool] | ModuleWrapPolicy | None = None,
        pretrained_weights: str | Mapping[str, str] | None = None,
    ) -> None:
        given = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        super().__init__()
        self.options: StrategyOptions = check_options(given)
        self.num_nodes = 1
        self._world: World | None = None
        self._collectives: Collectives | None = None
        self._run: Run | None = None
        self._watch: RunWatch | None = None
        self._sync_blocked = False
        self._renamed: dict[str, Any] = {}
        self._pending: PendingState | None = None

    def __repr__(self) -> str:
        # shown by the other package's Trainer, which refuses the strategy
        return f"<lightning.pytorch strategy D9DStrategy(schedule={self.options.schedule!r})>"

    # ---- processes -------------------------------------------------------------------------------------------------
    @property
    def root_device(self) -> torch.device:
        """Device of this process."""
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank if len(devices) > 1 else 0]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """Whether replicas see different data; ranks of one pipeline do not count, they need the same sampler."""
        return self.options.data_parallel_size > 1

    @property
    def device_mesh(self) -> DeviceMesh:
        """Axes ``pipeline_parallel``, ``data_parallel`` and ``tensor_parallel``."""
        return self._joined.mesh

    @property
    def _joined(self) -> World:
        if self._world is None:
            raise RuntimeError(
                "the processes are not connected yet; read this from configure_model or later, not before fit"
            )
        return self._world

    @property
    def _running(self) -> Run:
        if self._run is None:
            raise RuntimeError("the strategy is not set up; it is between Trainer.fit, validate, test or predict")
        return self._run

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        if environment is None:
            return
        self._launcher = make_launcher(
            self,
            environment,
            num_processes=self.num_processes,
            num_nodes=self.num_nodes,
            start_method=self.options.start_method,
            whole=self.whole_module,
            connected=lambda: self._watch is not None,
        )

    def _close_watch(self, together: bool = False) -> None:
        if self._watch is not None:
            self._watch.close(together)
            self._watch = None

    def set_world_ranks(self) -> None:
        """Tell the environment, and everything that works on rank 0 only, who this process is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        compat.set_rank_zero(self.global_rank)

    def setup_environment(self) -> None:
        """Connect the processes; ``configure_model`` can read the mesh afterwards."""
        super().setup_environment()
        self._pending = None
        self.set_world_ranks()
        environment = self.cluster_environment
        if environment is None:
            raise PipelineError("the trainer gave no cluster environment; pass the strategy to a Trainer")
        if self.lightning_module is not None:
            refuse_module(self.lightning_module, self.lightning_module.trainer)
        self._world = join_world(self.options, environment, self.root_device, self._world)
        self._collectives = Collectives(self._world, self.root_device)
        if self._world.axes.world > 1:
            # one device's running stream, on all processes: models, samplers and workers then draw alike
            compat.set_rng_states(self._collectives.broadcast(compat.collect_rng_states(include_cuda=False)))
        self._close_watch()
        self._watch = RunWatch(self._world, self.options, environment)
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = self._world.mesh
        if self._world.axes.world == 1:
            rank_zero_info(
                "D9DStrategy runs with one process, so there is no pipeline. Type Trainer(devices=N) to get one of N."
            )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Replicas see different samples, ranks of one pipeline the same. Predict is not divided: nothing is lost."""
        world = self._joined
        module = self.lightning_module
        if module is not None and module.trainer.predicting:
            return {"num_replicas": 1, "rank": 0}
        return {"num_replicas": world.axes.data, "rank": world.position.data}

    def process_dataloader(self, dataloader: object) -> object:
        """Seed workers by replica, and make loaders of all ranks end together."""
        world = self._joined
        if isinstance(dataloader, DataLoader):
            # Lightning would seed by global rank, and every rank of a pipeline would see other augmentations
            compat.add_worker_init_fn(dataloader, world.position.data)
        return self._running.wrap_loader(dataloader)

    # ---- setup -----------------------------------------------------------------------------------------------------
    def setup(self, trainer: Trainer) -> None:
        """Place the module, give this rank its part, connect loops, logs and metrics."""
        module = self.lightning_module
        accelerator = self.accelerator
        if module is None or accelerator is None:
            raise PipelineError("setup needs a trainer that was given a module")
        self._run = Run(trainer, module, self.options, self._joined, self.root_device, self.reduce)
        accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        fitting = trainer.state.fn == compat.TrainerFn.FITTING
        if fitting:
            self._reset_optimizers_and_schedulers()
            with several_optimizers_refused(module):
                self.setup_optimizers(trainer)
        pending, self._pending = self._pending, None
        self._run.place(self.optimizers, pending)
        self._run.connect(self.precision_plugin, self._watch)
        self.setup_precision_plugin()
        if fitting:
            compat.optimizers_to_device(self.optimizers, self.root_device)

    def model_to_device(self) -> None:
        """Move the whole module, before it is placed; what other ranks own is given up afterwards."""
        module = self.lightning_module
        if module is not None and not self._running.is_placed:
            # what was built on the meta device gets memory later, and only where it is owned
            module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(self.root_device))

    # ---- steps -----------------------------------------------------------------------------------------------------
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of one batch on this rank."""
        with self._watched("training_step"):
            output = self._running.training.run((*args, *kwargs.values()), synchronize=not self._sync_blocked)
            self._running.tell()
            return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """One validation batch on this rank."""
        with self._watched("validation_step"):
            return self._running.evaluate("validation_step", (*args, *kwargs.values()))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """One test batch on this rank."""
        with self._watched("test_step"):
            return self._running.evaluate("test_step", (*args, *kwargs.values()))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """One predict batch on this rank; rank 0 gets the outputs."""
        with self._watched("predict_step"):
            return self._running.evaluate("predict_step", (*args, *kwargs.values()))

    def _watched(self, step: str) -> AbstractContextManager[None]:
        return nullcontext() if self._watch is None else self._watch.action(step)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients of batches inside are accumulated and not reduced."""
        self._sync_blocked = True
        try:
            yield
        finally:
            self._sync_blocked = False

    # ---- between processes -----------------------------------------------------------------------------------------
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over data-parallel replicas."""
        return tensor if self._collectives is None else self._collectives.reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather over data-parallel replicas."""
        return tensor if self._collectives is None else self._collectives.all_gather(tensor, group, sync_grads)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of one process on all."""
        return obj if self._collectives is None else self._collectives.broadcast(obj, src)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        interrupted = self.lightning_module is not None and self.lightning_module.trainer.interrupted
        if self._collectives is not None and not interrupted:
            self._collectives.barrier()

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all processes, or any, decided so."""
        return decision if self._collectives is None else self._collectives.decide(decision, all)

    # ---- checkpoints -----------------------------------------------------------------------------------------------
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's part of the state dict, under the module's own names."""
        return self._running.local_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's part of the optimizer state, under the ids of the whole module."""
        return self._running.optimizer_state(getattr(optimizer, "_optimizer", optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write one plain Lightning file with the parts of all ranks; collective."""
        run = self._running
        if not run.meet_for_checkpoint(filepath):
            return
        paths = [filepath] if self._collectives is None else self._collectives.gather_objects(filepath)
        if any(path != paths[0] for path in paths):
            # the batch size finder, for one, makes up a name on every rank
            self._renamed[str(filepath)] = paths[0]
        if self.options.save_distributed_checkpoint:
            run.write_sharded(checkpoint, paths[0])
            return
        run.gather(checkpoint, paths[0])
        if self.is_global_zero:
            write_checkpoint(self.checkpoint_io, checkpoint, filepath, storage_options)
        if str(filepath) in self._renamed:
            self.barrier()

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a file or a directory."""
        if self.is_global_zero:
            remove_checkpoint(self.checkpoint_io, filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a plain Lightning file, without holding more of it than this rank takes."""
        path = self._renamed.get(str(checkpoint_path), checkpoint_path)
        checkpoint = read_checkpoint(self.checkpoint_io, path, weights_only)
        if str(checkpoint_path) in self._renamed:
            # rank 0 may remove the file right away
            self.barrier()
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part of the module, or keep it until the module is placed."""
        module = self.lightning_module
        if module is not None:
            is_split = self._joined.axes.pipeline > 1
            state = trained_state(module.trainer, checkpoint)
            self._pending = restore_module(module, state, strict, is_split=is_split)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the optimizer."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            self._running.load_optimizer(optimizer, state)
            compat.optimizer_to_device(optimizer, self.root_device)

    @contextmanager
    def whole_module(self) -> Iterator[LightningModule]:
        """The whole module on every rank, for ``state_dict()``, ``torch.save`` or ``model(x)``; collective."""
        self._running.meeting.attend("strategy.whole_module")
        with self._running.whole() as module:
            yield module

    def step_report(self) -> StepReport:
        """The latest training batch as it was measured, beside its prediction; collective over the pipeline.

        Raises:
            PipelineStateError: No training batch has run yet.
        """
        measured = self._running.measured
        if measured is None:
            raise PipelineStateError("steps are measured between setup and teardown of Trainer.fit only")
        return measured.report()

    # ---- end -------------------------------------------------------------------------------------------------------
    def on_exception(self, exception: BaseException) -> None:
        """From here on nobody may wait for another process."""
        if self._collectives is not None:
            self._collectives.closed = True
        if self._watch is not None:
            self._watch.publish(exception)

    def teardown(self) -> None:
        """End a run; the module stays placed and the groups stay open, for the next one."""
        if self._run is not None:
            self._run.disconnect()
        self._close_watch(together=self._collectives is not None and not self._collectives.closed)
        compat.optimizers_to_device(self.optimizers, torch.device("cpu"))
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()
        leave_world(self._world)
        if self._world is not None and self._world.is_temporary:
            self._collectives = None
            if self.lightning_module is not None:
                self.lightning_module._device_mesh = None
