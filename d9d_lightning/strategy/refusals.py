"""What cannot be pipelined, refused by name at setup, before any communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import LBFGS, Optimizer, SparseAdam

from d9d_lightning.errors import PipelineConfigurationError
from d9d_lightning.strategy.compat import TrainerFn, is_overridden, is_param_in_hook_signature, trainer_callbacks

__all__ = ["refuse_module", "refuse_optimizers"]


def refuse_module(module: LightningModule, trainer: Trainer) -> None:
    """Refuse what the strategy knows it cannot do with this module and trainer.

    Raises:
        PipelineConfigurationError: Names what it found and what to do instead.
    """
    name = type(module).__name__
    if not module.automatic_optimization and trainer.state.fn == TrainerFn.FITTING:
        raise PipelineConfigurationError(
            f"{name} sets automatic_optimization=False. Manual optimization calls backward and step inside "
            "training_step, which no single rank of a pipeline can do. Type `self.automatic_optimization = True` and "
            "return the loss, or train with another strategy."
        )
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        if is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True):
            raise PipelineConfigurationError(
                f"{name}.{step}(dataloader_iter) pulls its own batches, so they cannot be split into microbatches. "
                f"Type `def {step}(self, batch, batch_idx)`."
            )
    if any(isinstance(child, FullyShardedDataParallel) for child in module.modules()):
        raise PipelineConfigurationError(
            f"{name} holds modules wrapped by FullyShardedDataParallel. Its parameters are sharded over processes that "
            "hold different stages here. Leave the module unwrapped: a pipeline already splits its parameters."
        )
    for callback in trainer_callbacks(trainer):
        if isinstance(callback, StochasticWeightAveraging):
            raise PipelineConfigurationError(
                "StochasticWeightAveraging runs extra passes over the whole module, which no rank of a pipeline has. "
                "Type lightning.pytorch.callbacks.EMAWeightAveraging() instead."
            )
    _refuse_backward(module)


def _refuse_backward(module: LightningModule) -> None:
    if is_overridden("backward", module):
        raise PipelineConfigurationError(
            f"{type(module).__name__} overrides backward(), but a pipeline runs one backward per stage and microbatch "
            "and cannot call it. Move what it does to on_before_backward or on_after_backward."
        )


@contextmanager
def several_optimizers_refused(module: LightningModule) -> Iterator[None]:
    """Where Lightning refuses several optimizers, it advises manual optimization, which no pipeline can run.

    Raises:
        PipelineConfigurationError: Instead of Lightning's error, with advice that can be followed.
    """
    try:
        yield
    except RuntimeError as error:
        if "multiple optimizers" not in str(error):
            raise
        raise _several_optimizers(type(module).__name__, "several optimizers") from error


def _several_optimizers(name: str, what: str) -> PipelineConfigurationError:
    return PipelineConfigurationError(
        f"{name}.configure_optimizers returned {what}. A batch has one backward, and each rank steps once over what it "
        "owns. Return one optimizer with a parameter group for each: "
        "`torch.optim.Adam([{'params': ..., 'lr': ...}, {'params': ..., 'lr': ...}])`."
    )


def refuse_optimizers(module: LightningModule, optimizers: Sequence[Optimizer], replicas: int = 1) -> None:
    """Refuse optimizers that ranks cannot step alone.

    Raises:
        PipelineConfigurationError: Several optimizers, one that runs the closure more than once, or one that takes
            sparse gradients only, which replicas do not have.
    """
    name = type(module).__name__
    if len(optimizers) > 1:
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise _several_optimizers(name, f"{len(optimizers)} optimizers ({kinds})")
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise PipelineConfigurationError(
                f"{name}.configure_optimizers returned LBFGS, which runs the step as often as its own line search "
                "asks for; ranks would disagree. Use SGD, Adam or AdamW."
            )
        if isinstance(optimizer, SparseAdam) and replicas > 1:
            raise PipelineConfigurationError(
                f"{name}.configure_optimizers returned SparseAdam, which takes sparse gradients only; those averaged "
                "over replicas are dense. Use SGD, Adagrad or AdamW, or train with data_parallel_size=1."
            )
