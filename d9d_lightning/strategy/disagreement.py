"""Processes that were not started alike are told so before the first batch, by name of what differs."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import lightning
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch import LightningModule
from torch.distributed import ProcessGroup
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from d9d_lightning import __version__
from d9d_lightning.errors import PipelineError
from d9d_lightning.runtime.headers import checks_every_message
from d9d_lightning.strategy.options import StrategyOptions

__all__ = ["RanksDisagreeError", "compare_setups", "describe_setup"]

_COMPARED_OPTIONS = (
    "pipeline_parallel_size",
    "data_parallel_size",
    "num_microbatches",
    "units",
    "split_points",
    "owner_only_hooks",
    "bucket_size_mb",
    "gradient_dtype",
    "save_distributed_checkpoint",
    "broadcast_batches",
)


class RanksDisagreeError(PipelineError, RuntimeError):
    """The processes of one run were started with different code, arguments or modules."""


def describe_setup(
    options: StrategyOptions, module: LightningModule, optimizers: Sequence[Optimizer]
) -> dict[str, str]:
    """What must be equal on all processes, each under a name that a user knows.

    Args:
        options: Arguments of the strategy.
        module: The user's module.
        optimizers: Its optimizers.
    """
    schedule = options.schedule if isinstance(options.schedule, str) else type(options.schedule).__qualname__
    setup = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "lightning": lightning.__version__,
        "torchmetrics": torchmetrics.__version__,
        "d9d_lightning": __version__,
        "the variable D9D_DEBUG": str(int(checks_every_message())),
        "D9DStrategy(schedule)": schedule,
        "class of the module": type(module).__qualname__,
        "classes of the optimizers": str([type(optimizer).__qualname__ for optimizer in optimizers]),
        "parameter groups": str([len(optimizer.param_groups) for optimizer in optimizers]),
    }
    policy = options.activation_checkpointing_policy
    # functions and policy objects show an address, which differs
    shown = type(policy).__qualname__ if callable(policy) or hasattr(policy, "_run_policy") else policy
    setup["D9DStrategy(activation_checkpointing_policy)"] = str(shown)
    setup |= {f"D9DStrategy({name})": repr(getattr(options, name)) for name in _COMPARED_OPTIONS}
    return setup | _describe_tensors(module)


def _describe_tensors(module: LightningModule) -> dict[str, str]:
    tensors = [
        f"{name} {tuple(tensor.shape)} {tensor.dtype}{' trained' if tensor.requires_grad else ''}"
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        if not is_lazy(tensor)
    ]
    digest = hashlib.blake2b("\n".join(tensors).encode(), digest_size=6).hexdigest()
    return {"parameters and buffers": f"{len(tensors)} tensors ({digest})"}


def compare_setups(own: Mapping[str, str], group: ProcessGroup | None) -> None:
    """Raise on every process if one differs from the first; collective.

    Args:
        own: See :func:`describe_setup`.
        group: A gloo group of all processes; None where one is alone.

    Raises:
        RanksDisagreeError: Names what differs, and what each process has.
    """
    if group is None:
        return
    setups: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(setups, dict(own), group=group)
    differing = []
    for name in setups[0]:
        values = [setup.get(name, "nothing") for setup in setups]
        if len(set(values)) > 1:
            differing.append(f"  {name}: " + ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values)))
    if differing:
        raise RanksDisagreeError(
            "the processes of this run were not started alike:\n"
            + "\n".join(differing)
            + "\nExpected: the same packages, arguments and module on every process. Install the same versions, and let"
            " nothing in the script depend on the rank before `Trainer.fit`."
        )
