"""Everything taken from Lightning that Lightning does not promise to keep, and the versions it was checked against.

All private imports live here, one test each, so that a new Lightning release is judged by one file.
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.fabric.utilities.data import _auto_add_worker_init_fn as add_worker_init_fn
from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available as gather_over
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device as default_backend_for,
)
from lightning.fabric.utilities.distributed import _init_dist_connection as init_process_group
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as set_num_threads_if_needed
from lightning.fabric.utilities.distributed import _sync_ddp_if_available as reduce_over
from lightning.fabric.utilities.load import _METADATA_FILENAME as METADATA_FILENAME
from lightning.fabric.utilities.optimizer import _optimizer_to_device as optimizer_to_device
from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import _collect_rng_states as collect_rng_states
from lightning.fabric.utilities.seed import _set_rng_states as set_rng_states
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization as AutomaticOptimization
from lightning.pytorch.strategies.launchers.launcher import _Launcher as Launcher
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher as MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as SubprocessScriptLauncher,
)
from lightning.pytorch.trainer import call as trainer_call
from lightning.pytorch.trainer import trainer as trainer_module
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection as ResultCollection
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch.distributed.constants import default_pg_timeout

from d9d_lightning.errors import PipelineConfigurationError

__all__ = [
    "METADATA_FILENAME",
    "AutomaticOptimization",
    "Closure",
    "ClosureResult",
    "Launcher",
    "MultiProcessingLauncher",
    "ResultCollection",
    "SubprocessScriptLauncher",
    "TrainerFn",
    "add_worker_init_fn",
    "check_versions",
    "collect_rng_states",
    "default_backend_for",
    "default_pg_timeout",
    "explain_mixed_packages",
    "gather_over",
    "init_process_group",
    "is_overridden",
    "is_param_in_hook_signature",
    "optimizer_to_device",
    "optimizers_to_device",
    "reduce_over",
    "set_num_threads_if_needed",
    "set_rank_zero",
    "set_rng_states",
    "trainer_call",
    "trainer_callbacks",
]

LIGHTNING_RANGE = ((2, 6, 4), (2, 7, 0))
TORCH_RANGE = ((2, 11, 0), (2, 15, 0))


def parse_version(text: str) -> tuple[int, int, int]:
    """First three numbers of a version; local and pre-release parts do not count.

    >>> parse_version("2.13.0+cpu")
    (2, 13, 0)
    """
    numbers = []
    for part in text.split("+")[0].split(".")[:3]:
        digits = "".join(ch for ch in part if ch.isdigit())
        numbers.append(int(digits) if digits else 0)
    padded = [*numbers, 0, 0, 0]
    return padded[0], padded[1], padded[2]


def trainer_callbacks(trainer: Trainer) -> list[Callback]:
    """Callbacks of a trainer, in order."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def set_rank_zero(rank: int) -> None:
    """Tell everything that works on rank 0 only which rank this is."""
    for only in (fabric_rank_zero_only, utilities_rank_zero_only):
        only.rank = rank  # type: ignore[attr-defined]


def explain_mixed_packages() -> None:
    """Make a trainer say what is wrong with a module of the other package.

    Lightning's own check looks at the module of the class itself, and so misses every class that a user wrote.
    """
    original = trainer_module._maybe_unwrap_optimized  # type: ignore[attr-defined]
    if getattr(original, "explains_mixed_packages", False):
        return

    def unwrap(model: Any) -> Any:
        foreign = next((base for base in type(model).__mro__ if base.__module__.startswith("pytorch_lightning.")), None)
        if foreign is not None:
            raise PipelineConfigurationError(
                f"{type(model).__name__} is a `pytorch_lightning` module, but the Trainer is from `lightning`. The two "
                "packages have separate classes. Type `import lightning as L` and derive it from L.LightningModule."
            )
        return original(model)

    unwrap.explains_mixed_packages = True  # type: ignore[attr-defined]
    trainer_module._maybe_unwrap_optimized = unwrap  # type: ignore[attr-defined]


def check_versions(lightning_version: str | None = None, torch_version: str | None = None) -> None:
    """Refuse versions that were never tried, before they fail in an unreadable place.

    Raises:
        PipelineConfigurationError: A version is outside the supported range.
    """
    given = {
        "lightning": (lightning_version or lightning.__version__, LIGHTNING_RANGE),
        "torch": (torch_version or torch.__version__, TORCH_RANGE),
    }
    for name, (text, (lowest, beyond)) in given.items():
        if not lowest <= parse_version(text) < beyond:
            low, high = (".".join(map(str, bound)) for bound in (lowest, beyond))
            raise PipelineConfigurationError(
                f"{name} {text} is installed, but d9d_lightning was checked against {name}>={low},<{high} only. "
                f"Type: pip install '{name}>={low},<{high}'"
            )
