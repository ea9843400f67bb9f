"""The user's optimizer over the parameters of this rank, with the groups and ids of the whole module.

``configure_optimizers`` runs on the whole module, so that selections by name, group counts and schedulers come out as
written. Then each group keeps what this rank owns. Ids in checkpoints stay those of the whole module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["OptimizerLayout", "prune_optimizer", "read_layout", "to_global_state", "to_local_state"]


@dataclass(frozen=True)
class OptimizerLayout:
    """Names of the parameters of each group, as the user's optimizer got them.

    Attributes:
        groups: One tuple per group. None stands for a tensor that the module does not hold under any name.
    """

    groups: tuple[tuple[str | None, ...], ...]

    def global_ids(self) -> tuple[tuple[int, ...], ...]:
        """Ids that a plain checkpoint gives the parameters: counted through all groups."""
        ids, start = [], 0
        for group in self.groups:
            ids.append(tuple(range(start, start + len(group))))
            start += len(group)
        return tuple(ids)


def read_layout(optimizer: Optimizer, module: nn.Module) -> OptimizerLayout:
    """Layout of an optimizer that holds the whole module."""
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    return OptimizerLayout(
        tuple(tuple(names.get(id(parameter)) for parameter in group["params"]) for group in optimizer.param_groups)
    )


def prune_optimizer(
    optimizer: Optimizer, layout: OptimizerLayout, owned: Mapping[str, Tensor], *, drop_state: bool = True
) -> None:
    """Keep this rank's parameters only; every group stays, even an empty one.

    Args:
        optimizer: The user's optimizer.
        layout: Its layout, from before.
        owned: This rank's parameters by name.
        drop_state: Whether state of what is given up is dropped.
    """
    for group, names in zip(optimizer.param_groups, layout.groups, strict=True):
        kept, places = [], []
        for place, (name, parameter) in enumerate(zip(names, group["params"], strict=True)):
            if name is not None and name not in owned:
                continue
            places.append(place)
            kept.append(parameter if name is None else owned[name])
            if kept[-1] is not parameter and parameter in optimizer.state:
                optimizer.state[kept[-1]] = optimizer.state.pop(parameter)
        group["params"] = kept
        if "param_names" in group:
            group["param_names"] = [group["param_names"][place] for place in places]
    if not drop_state:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in [key for key in optimizer.state if isinstance(key, Tensor) and id(key) not in held]:
        del optimizer.state[parameter]


def _kept_ids(layout: OptimizerLayout, owned: Mapping[str, Tensor]) -> list[list[int]]:
    """Global ids of what each group of this rank holds, in order."""
    return [
        [identifier for identifier, name in zip(ids, names, strict=True) if name is None or name in owned]
        for ids, names in zip(layout.global_ids(), layout.groups, strict=True)
    ]


def to_global_state(state: dict[str, Any], layout: OptimizerLayout, owned: Mapping[str, Tensor]) -> dict[str, Any]:
    """State of a pruned optimizer under the ids of the whole module; groups list every id of the module.

    Args:
        state: ``optimizer.state_dict()`` of this rank.
        layout: Layout of the whole optimizer.
        owned: This rank's parameters by name.
    """
    kept = [identifier for group in _kept_ids(layout, owned) for identifier in group]
    groups = []
    for group, ids, names in zip(state["param_groups"], layout.global_ids(), layout.groups, strict=True):
        groups.append({**group, "params": list(ids)})
        if "param_names" in group:
            groups[-1]["param_names"] = [str(name) for name in names]
    return {
        **state,
        "state": {kept[local]: value for local, value in state["state"].items()},
        "param_groups": groups,
    }


def to_local_state(state: Mapping[str, Any], layout: OptimizerLayout, owned: Mapping[str, Tensor]) -> dict[str, Any]:
    """Inverse of :func:`to_global_state`: the part of a whole state that this rank's optimizer loads."""
    kept_by_group = _kept_ids(layout, owned)
    saved_groups: Sequence[Mapping[str, Any]] = state["param_groups"]
    # a checkpoint may number its parameters in any way; only the order inside a group says which one is meant
    saved_ids = {
        expected: saved
        for ids, group in zip(layout.global_ids(), saved_groups, strict=True)
        for expected, saved in zip(ids, group["params"], strict=True)
    }
    local: dict[int, int] = {}
    groups = []
    for kept, saved in zip(kept_by_group, saved_groups, strict=True):
        start = len(local)
        local.update({saved_ids[identifier]: start + index for index, identifier in enumerate(kept)})
        groups.append({**saved, "params": list(range(start, start + len(kept)))})
        if "param_names" in saved:
            by_id = dict(zip(saved["params"], saved["param_names"], strict=True))
            groups[-1]["param_names"] = [by_id[saved_ids[identifier]] for identifier in kept]
    return {
        **state,
        "state": {local[saved]: value for saved, value in state["state"].items() if saved in local},
        "param_groups": groups,
    }
