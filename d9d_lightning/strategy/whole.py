"""Makes a module whole again: every rank gets the parameters and buffers that other ranks own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

__all__ = ["Ownership", "whole_module"]


@dataclass(frozen=True)
class Ownership:
    """Who has which tensor of the module.

    Attributes:
        rank: This pipeline rank.
        owners: For every parameter and buffer, the pipeline rank that saves it and from which others take it.
        held: Names that this rank has, its own and shared ones.
    """

    rank: int
    owners: Mapping[str, int]
    held: frozenset[str]

    def saves(self, name: str) -> bool:
        """Whether this rank puts the tensor into checkpoints."""
        return self.owners.get(name) == self.rank


@contextmanager
def whole_module(
    module: nn.Module,
    ownership: Ownership,
    *,
    process_of: Callable[[int], int],
    group: ProcessGroup | None,
    device: torch.device,
) -> Iterator[nn.Module]:
    """The whole module inside; collective when entered. Afterwards each rank has its own part again.

    Args:
        module: The user's module.
        ownership: Who has what.
        process_of: Global rank of a pipeline rank.
        group: Group of the pipeline that carries the tensors; None for one process.
        device: Device of this rank.
    """
    fetched: dict[int, Tensor] = {}
    if group is not None:
        for name, owner in sorted(ownership.owners.items()):
            _fetch(module, name, ownership, process_of(owner), group, device, fetched)
    undo = _swap(module, fetched)
    try:
        yield module
    finally:
        for table, leaf, old in undo:
            table[leaf] = old


def _fetch(
    module: nn.Module,
    name: str,
    ownership: Ownership,
    source: int,
    group: ProcessGroup,
    device: torch.device,
    fetched: dict[int, Tensor],
) -> None:
    prefix, _, leaf = name.rpartition(".")
    holder = module.get_submodule(prefix)
    current: Tensor | None = holder._parameters.get(leaf)
    if current is None:
        current = holder._buffers.get(leaf)
    if current is None:
        return
    if ownership.saves(name):
        dist.broadcast(current.detach().to(device).contiguous(), source, group=group)
        return
    received = torch.empty(tuple(current.shape), dtype=current.dtype, device=device)
    dist.broadcast(received, source, group=group)
    # an owner of a shared parameter has it already, but took part in the broadcast
    if name not in ownership.held:
        is_parameter = isinstance(current, nn.Parameter) or leaf in holder._parameters
        trains = bool(current.requires_grad)
        fetched[id(current)] = nn.Parameter(received, requires_grad=trains) if is_parameter else received


def _swap(
    module: nn.Module, fetched: Mapping[int, Tensor]
) -> list[tuple[dict[str, Tensor | None], str, Tensor | None]]:
    """Put fetched tensors in place everywhere, so that tied names stay tied."""
    undo: list[tuple[dict[str, Tensor | None], str, Tensor | None]] = []
    for child in module.modules():
        tables: tuple[dict[str, Tensor | None], ...] = (child._parameters, child._buffers)  # type: ignore[assignment]
        for table in tables:
            for leaf, old in list(table.items()):
                if old is not None and id(old) in fetched:
                    undo.append((table, leaf, old))
                    table[leaf] = fetched[id(old)]
    return undo
