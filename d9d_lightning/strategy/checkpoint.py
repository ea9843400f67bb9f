"""One plain Lightning checkpoint from the parts of all ranks, and the part of a rank from any plain checkpoint.

Hooks and callbacks see local parts under the module's own names. When the file is written, rank 0 of the pipeline takes
the parts of the other ranks one after the other. Reading needs no communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map, tree_map_with_path

from d9d_lightning.errors import PipelineConfigurationError, PlaceholderReadError
from d9d_lightning.partition.placeholder import is_placeholder
from d9d_lightning.strategy.optimizers import OptimizerLayout, to_local_state
from d9d_lightning.strategy.stored import shape_in, take_from
from d9d_lightning.strategy.stream import receive_tree, send_tree
from d9d_lightning.strategy.whole import Ownership

__all__ = [
    "NAMED_PARTS",
    "check_names",
    "gather_checkpoint",
    "load_module",
    "load_optimizer",
    "local_state_dict",
    "names_given",
    "own_entries",
]

_FOUND = "found"
NAMED_PARTS = ("state_dict", "current_model_state")
"""Entries of a checkpoint that map the module's names to tensors; the second one is written by weight averaging."""


def canonical_names(module: nn.Module) -> dict[str, str]:
    """For every name of a parameter or buffer, the first name of the same tensor; tied weights have several."""
    first: dict[int, str] = {}
    names = {}
    for found in (module.named_parameters, module.named_buffers):
        for name, tensor in found(remove_duplicate=False):
            names[name] = first.setdefault(id(tensor), name)
    return names


def names_given(module: nn.Module, state: Mapping[str, Any]) -> set[str]:
    """Parameters and buffers that a state dict has, under each of their names."""
    names = canonical_names(module)
    first = {names[key] for key in state if key in names}
    return {name for name, canonical in names.items() if canonical in first}


def local_state_dict(module: LightningModule, ownership: Ownership, is_loss_owner: bool) -> dict[str, Any]:
    """The entries of ``module.state_dict()`` that this rank saves.

    What is neither a parameter nor a buffer (extra state, keys of an overridden ``state_dict``) is the loss owner's.
    """
    return own_entries(module.state_dict(), module, ownership, is_loss_owner)


def own_entries(
    state: Mapping[str, Any], module: nn.Module, ownership: Ownership, is_loss_owner: bool
) -> dict[str, Any]:
    """The entries of a state dict that this rank saves."""
    names = canonical_names(module)
    own = {
        key: value for key, value in state.items() if (ownership.saves(names[key]) if key in names else is_loss_owner)
    }
    for key, value in own.items():
        if is_placeholder(value):
            raise PlaceholderReadError(
                f"{key!r} was set to what was computed from {value.origin!r}, which lives on another rank, so there is "
                "no value to save. Expected: the lines that set it, on all ranks, within "
                "`with self.trainer.strategy.whole_module():`."
            )
    return own


def gather_checkpoint(
    checkpoint: MutableMapping[str, Any],
    *,
    order: Sequence[str],
    process: int,
    processes: Sequence[int],
    group: ProcessGroup,
    spool: Path | None,
) -> None:
    """Merge the parts of all ranks of a pipeline into the checkpoint of its first process; collective.

    Args:
        checkpoint: What Lightning collected on this rank. Changed on the first process only.
        order: Names of the whole module in their usual order.
        process: This process within the pipeline.
        processes: Global ranks of the pipeline.
        group: A gloo group of them.
        spool: Directory for large tensors on their way.
    """
    parts = (*NAMED_PARTS, "optimizer_states")
    rest = {key: value for key, value in checkpoint.items() if key not in parts}
    first = process == 0
    wanted: list[Any] = [_unknown_leaves(rest)] if first else [None]
    dist.broadcast_object_list(wanted, processes[0], group=group)
    if process:
        own = {key: checkpoint[key] for key in parts if key in checkpoint}
        send_tree({**own, _FOUND: _known_leaves(rest, wanted[0])}, processes[0], group)
        return
    found: dict[str, Tensor] = {}
    for source in processes[1:]:
        part = receive_tree(source, group, spool)
        found = {**part.pop(_FOUND), **found}
        _merge(checkpoint, part)
    if wanted[0]:
        checkpoint.update(_completed(rest, found))
    for key in NAMED_PARTS:
        if key in checkpoint:
            checkpoint[key] = _in_order(checkpoint[key], order)
    for state in checkpoint.get("optimizer_states", ()):
        state["state"] = dict(sorted(state["state"].items()))


def _unknown_leaves(tree: Any) -> list[str]:
    """Where a tree has tensors whose values are on other ranks."""
    return [keystr(path) for path, leaf in tree_flatten_with_path(tree)[0] if is_placeholder(leaf)]


def _known_leaves(tree: Any, wanted: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of a tree at some places, as far as this rank has their values."""
    if not wanted:
        return {}
    leaves = {keystr(path): leaf for path, leaf in tree_flatten_with_path(tree)[0]}
    known = {place: leaves.get(place) for place in wanted}
    return {place: leaf for place, leaf in known.items() if isinstance(leaf, Tensor) and not is_placeholder(leaf)}


def _completed(tree: Any, found: Mapping[str, Tensor]) -> Any:
    def complete(path: Any, leaf: Any) -> Any:
        if not is_placeholder(leaf):
            return leaf
        place = keystr(path)
        if place not in found:
            raise PlaceholderReadError(
                f"the checkpoint's entry {place} was computed from {leaf.origin!r}, and no rank knows its value. "
                "Expected: entries that the owner of a parameter can compute; or compute them, on all ranks, within "
                "`with trainer.strategy.whole_module():`."
            )
        return found[place]

    return tree_map_with_path(complete, tree)


def _merge(whole: MutableMapping[str, Any], part: Mapping[str, Any]) -> None:
    for key in NAMED_PARTS:
        for name, value in part.get(key, {}).items():
            whole[key].setdefault(name, value)
    for state, other in zip(whole.get("optimizer_states", ()), part.get("optimizer_states", ()), strict=True):
        for identifier, value in other["state"].items():
            state["state"].setdefault(identifier, value)


def _in_order(tensors: Mapping[str, Any], order: Iterable[str]) -> dict[str, Any]:
    known = {name: tensors[name] for name in order if name in tensors}
    return {**known, **{name: value for name, value in tensors.items() if name not in known}}


def load_module(module: nn.Module, state: Mapping[str, Any], ownership: Ownership | None, strict: bool) -> None:
    """Load a whole state dict into a module of which this rank may hold a part.

    Args:
        module: The module.
        state: A state dict under the names of the whole module.
        ownership: What this rank holds; None while the module is whole.
        strict: Whether names must match, judged on the whole module.

    Raises:
        RuntimeError: Names or shapes do not match.
    """
    if ownership is None:
        module.load_state_dict(take_from(state, list(state)), strict=strict)
        return
    names = canonical_names(module)
    check_names(module, state, strict)
    part = take_from(state, [key for key in state if key not in names or names[key] in ownership.held])
    module.load_state_dict(part, strict=False)


def check_names(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """See that a whole state dict fits a module, on every rank alike, whatever it holds of it.

    Raises:
        RuntimeError: Shapes do not match or, with ``strict``, names.
    """
    own = module.state_dict()
    missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(module).__name__}: missing keys {missing}, unexpected keys "
            f"{unexpected}. Expected the names of the module. Set `self.strict_loading = False` to allow differences."
        )
    if not all(map(_loads_plainly, module.modules())):
        return
    for name, parameter in module.named_parameters(remove_duplicate=False):
        given = shape_in(state, name)
        if given is not None and given != parameter.shape:
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(module).__name__}: size mismatch for {name}: the checkpoint "
                f"has {list(given)}, the module {list(parameter.shape)}."
            )


def _loads_plainly(module: nn.Module) -> bool:
    """Whether a module takes tensors of its own shapes only."""
    own = type(module)._load_from_state_dict is nn.Module._load_from_state_dict
    return own and not module._load_state_dict_pre_hooks


def load_optimizer(
    optimizer: Optimizer, state: Mapping[str, Any], layout: OptimizerLayout, owned: Mapping[str, Tensor]
) -> None:
    """Load this rank's part of a whole optimizer state.

    Raises:
        PipelineConfigurationError: The checkpoint has other parameter groups than the optimizer.
    """
    expected = [len(group) for group in layout.groups]
    given = [len(group["params"]) for group in state["param_groups"]]
    if expected != given:
        raise PipelineConfigurationError(
            f"the checkpoint's optimizer has parameter groups of {given} parameters, but configure_optimizers made "
            f"groups of {expected}. Resume with the groups that the checkpoint was written with."
        )
    local = to_local_state(state, layout, owned)
    # mapped tensors would keep reading from the file as long as the optimizer lives
    local["state"] = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, local["state"])
    optimizer.load_state_dict(local)
