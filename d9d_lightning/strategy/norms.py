"""Gradient norms to log: of the whole module, where Lightning's own function sees the part of one rank."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from d9d_lightning.gradients import global_gradient_norm
from d9d_lightning.partition.placeholder import is_placeholder
from d9d_lightning.strategy.placement import known_placement
from d9d_lightning.values import LogRecord

__all__ = ["grad_norm", "warn_of_local_norms"]

_KEY = re.compile(r"grad_[\w.]+_norm(_total|\W(?P<name>.+))")


def grad_norm(module: LightningModule, norm_type: float | str = 2.0, group_separator: str = "/") -> dict[str, Tensor]:
    """Norms of the gradients of all parameters; takes the place of ``lightning.pytorch.utilities.grad_norm``.

    Collective over the pipeline: call it in a hook that every rank runs, such as ``on_before_optimizer_step``. It also
    works with any other strategy.

    Args:
        module: The module under training.
        norm_type: The p of the p-norm.
        group_separator: Between the prefix and a parameter's name.

    Returns:
        ``grad_2.0_norm/<name>`` for every parameter with a gradient, and ``grad_2.0_norm_total``; equal on all ranks.

    Raises:
        ValueError: ``norm_type`` is not positive.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}; give a positive number or math.inf")
    placed = known_placement(module)
    own = {
        name: float(global_gradient_norm([parameter], norm_type=norm_type))
        for name, parameter in module.named_parameters()
        if parameter.grad is not None and (placed is None or placed.size == 1 or placed.ownership.saves(name))
    }
    everywhere = _gather(module, own) if placed is not None and placed.size > 1 else own
    found = {name: torch.tensor(everywhere[name]) for name, _ in module.named_parameters() if name in everywhere}
    norms = {f"grad_{norm_type}_norm{group_separator}{name}": norm for name, norm in found.items()}
    if norms:
        norms[f"grad_{norm_type}_norm_total"] = torch.stack(list(found.values())).norm(norm_type)
    return norms


def _gather(module: LightningModule, own: dict[str, float]) -> dict[str, float]:
    strategy: Any = module.trainer.strategy
    group = strategy._joined.groups.pipeline_control
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, own, group=group)
    return {name: norm for part in parts for name, norm in part.items()}


def warn_of_local_norms(module: LightningModule, records: Iterable[LogRecord]) -> None:
    """Say so, once, where a hook logs norms that leave out what other ranks hold."""
    if getattr(module, "_d9d_warned_of_norms", False):
        return
    matches = [match for record in records if (match := _KEY.fullmatch(record.name)) is not None]
    named = {match["name"] for match in matches if match["name"]}
    if not named or len(named) == len(matches):
        return
    trained = dict(module.named_parameters())
    foreign = {name for name, parameter in trained.items() if parameter.requires_grad and is_placeholder(parameter)}
    if foreign and not foreign & named:
        object.__setattr__(module, "_d9d_warned_of_norms", True)
        rank_zero_warn(
            "the logged gradient norms leave out what other ranks hold: `lightning.pytorch.utilities.grad_norm` "
            "sees one rank. Type `from d9d_lightning.strategy import grad_norm`; it takes the same arguments."
        )
