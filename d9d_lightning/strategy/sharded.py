"""Checkpoints as a directory: every rank writes its part under the module's names, any number of ranks reads it.

The layout is the one of Lightning's ``ModelParallelStrategy``: the tensors as a ``torch.distributed.checkpoint``, all
else in one file beside them. So Lightning's ``consolidate_checkpoint`` makes one file of it. A rank that resumes reads
what it owns.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict_saver import save as save_parts

from d9d_lightning.strategy.compat import METADATA_FILENAME
from d9d_lightning.strategy.directories import replace_directory
from d9d_lightning.strategy.optimizers import OptimizerLayout
from d9d_lightning.strategy.stored import StoredEntries, StoredMapping
from d9d_lightning.strategy.trust import load_file

__all__ = ["is_sharded", "name_optimizer_state", "number_optimizer_state", "read_sharded", "write_sharded"]


MODULE_KEY = "model"
"""Where Lightning's tool looks for the module's tensors."""

_AVERAGE_KEY = "current_model_state"


def is_sharded(path: str | os.PathLike[str]) -> bool:
    """Whether a path holds a directory checkpoint."""
    return Path(path).is_dir() and (Path(path) / METADATA_FILENAME).is_file()


def name_optimizer_state(state: Mapping[str, Any], layout: OptimizerLayout) -> dict[str, Any]:
    """The same state under parameter names instead of numbers."""
    names = {
        identifier: str(name)
        for ids, group in zip(layout.global_ids(), layout.groups, strict=True)
        for identifier, name in zip(ids, group, strict=True)
    }
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[i]: value for i, value in state["state"].items()}, "param_groups": groups}


def number_optimizer_state(state: Mapping[str, Any], layout: OptimizerLayout) -> Mapping[str, Any]:
    """Inverse of :func:`name_optimizer_state`; a state with numbers stays as it is."""
    if not any(isinstance(name, str) for group in state["param_groups"] for name in group["params"]):
        return state
    ids = {
        str(name): identifier
        for identifiers, group in zip(layout.global_ids(), layout.groups, strict=True)
        for identifier, name in zip(identifiers, group, strict=True)
    }
    groups = [{**group, "params": [ids[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {ids[name]: value for name, value in state["state"].items()}, "param_groups": groups}


def write_sharded(
    checkpoint: MutableMapping[str, Any],
    path: str | os.PathLike[str],
    layouts: Sequence[OptimizerLayout],
    *,
    group: ProcessGroup | None,
    is_first: bool,
) -> None:
    """Write the parts of one pipeline; collective over it.

    Everything goes to a directory beside the target, which takes its place when it is complete.

    Args:
        checkpoint: What Lightning collected on this rank, with this rank's parts.
        path: The target.
        layouts: One for each optimizer.
        group: Ranks of the pipeline; None for one.
        is_first: Whether this process is the first one of the world.
    """
    tensors: dict[str, Any] = {MODULE_KEY: dict(checkpoint.pop("state_dict"))}
    for index, (state, layout) in enumerate(zip(checkpoint.pop("optimizer_states", []), layouts, strict=False)):
        tensors[f"optimizer_{index}"] = name_optimizer_state(state, layout)
    if _AVERAGE_KEY in checkpoint:
        tensors[_AVERAGE_KEY] = dict(checkpoint.pop(_AVERAGE_KEY))
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{_agree(uuid.uuid4().hex[:8], group)}.part")
    temporary.mkdir(parents=True, exist_ok=True)
    save_parts(tensors, checkpoint_id=temporary, process_group=group, no_dist=group is None)
    if is_first:
        torch.save(dict(checkpoint), temporary / METADATA_FILENAME)
        replace_directory(temporary, target)
    if group is not None:
        dist.barrier(group=group)


def _agree(value: str, group: ProcessGroup | None) -> str:
    if group is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, dist.get_process_group_ranks(group)[0], group=group)
    return box[0]


def read_sharded(path: str | os.PathLike[str], weights_only: bool | None) -> dict[str, Any]:
    """A directory checkpoint in the form of a plain one; optimizer states keep parameter names.

    Tensors of the module and of optimizer states are read later, when a rank takes its own.
    """
    checkpoint = load_file(Path(path) / METADATA_FILENAME, weights_only)
    entries = StoredEntries(path)
    present = {key for key, *_ in entries.paths.values()}
    # Lightning's own strategy for several axes has another name for it
    module_key = MODULE_KEY if MODULE_KEY in present else "state_dict"
    checkpoint["state_dict"] = StoredMapping(entries, (module_key,))
    if _AVERAGE_KEY in present:
        checkpoint[_AVERAGE_KEY] = StoredMapping(entries, (_AVERAGE_KEY,))
    states: list[dict[str, Any]] = []
    while (key := f"optimizer_{len(states)}") in present:
        states.append(
            {**entries.read_nested((key,), without=(key, "state")), "state": StoredMapping(entries, (key, "state"))}
        )
    if states:
        checkpoint["optimizer_states"] = states
    return checkpoint
