"""One optimizer of the user, over the parameters of this rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from d9d_lightning.strategy.checkpoint import load_optimizer
from d9d_lightning.strategy.optimizers import OptimizerLayout, prune_optimizer, read_layout, to_global_state
from d9d_lightning.strategy.sharded import number_optimizer_state
from d9d_lightning.strategy.stored import StoredMapping

__all__ = ["OwnedOptimizer"]


class OwnedOptimizer:
    """Keeps the groups of the whole module in mind while the optimizer holds this rank's parameters.

    Args:
        optimizer: The user's optimizer, over the whole module.
        module: The user's module, not yet released, so that every parameter has its name.
    """

    def __init__(self, optimizer: Optimizer, module: nn.Module) -> None:
        self._optimizer = optimizer
        self._module = module
        self._layout = read_layout(optimizer, module)
        self._owned: Mapping[str, Tensor] = {}

    @property
    def layout(self) -> OptimizerLayout:
        """Layout of the whole optimizer."""
        return self._layout

    @property
    def group_names(self) -> list[list[str]]:
        """Names of the parameters of each group of the whole module."""
        return [[str(name) for name in names] for names in self._layout.groups]

    @property
    def state_tensors(self) -> list[Tensor]:
        """Tensors that the optimizer keeps for this rank's parameters; none before its first step."""
        return [leaf for leaf in tree_leaves(list(self._optimizer.state.values())) if isinstance(leaf, Tensor)]

    def prune(self, owned: Mapping[str, Tensor]) -> None:
        """Give up the parameters of other ranks, also of groups that are added later (unfreezing)."""
        self._owned = owned
        prune_optimizer(self._optimizer, self._layout, owned)
        add = type(self._optimizer).add_param_group.__get__(self._optimizer)

        def add_param_group(group: dict[str, Any]) -> None:
            add(group)
            self._adopt_last_group()

        self._optimizer.add_param_group = add_param_group  # type: ignore[method-assign, assignment]

    def _adopt_last_group(self) -> None:
        kept = self._optimizer.param_groups[:-1]
        self._optimizer.param_groups = self._optimizer.param_groups[-1:]
        try:
            last = read_layout(self._optimizer, self._module)
            prune_optimizer(self._optimizer, last, self._owned, drop_state=False)
        finally:
            self._optimizer.param_groups = [*kept, *self._optimizer.param_groups]
        self._layout = OptimizerLayout((*self._layout.groups, *last.groups))

    def state(self) -> dict[str, Any]:
        """This rank's state under the ids of the whole module."""
        return to_global_state(self._optimizer.state_dict(), self._layout, self._owned)

    def load(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a whole state."""
        held = sum(len(group["params"]) for group in self._optimizer.param_groups)
        expected = sum(name is None or name in self._owned for names in self._layout.groups for name in names)
        if len(self._optimizer.param_groups) != len(self._layout.groups) or held != expected:
            # a callback has put groups of the whole module back (finetuning resumes so)
            self._layout = read_layout(self._optimizer, self._module)
            prune_optimizer(self._optimizer, self._layout, self._owned)
        stored = state["state"]
        if isinstance(stored, StoredMapping):
            own = (str(name) for names in self._layout.groups for name in names if name is None or name in self._owned)
            state = {**state, "state": stored.take(name for name in own if name in stored)}
        state = number_optimizer_state(state, self._layout)
        load_optimizer(self._optimizer, state, self._layout, self._owned)
