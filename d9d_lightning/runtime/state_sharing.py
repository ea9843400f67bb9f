"""After a batch, the state that the step has changed is on every rank what it is on the loss owner."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from d9d_lightning.runtime.groups import PipelineGroups
from d9d_lightning.stage.world import PrivateWorld, adopt_state, export_state

__all__ = ["share_state"]


def share_state(
    module: nn.Module, names: Sequence[str], world: PrivateWorld | None, groups: PipelineGroups | None, owner: int
) -> None:
    """Commit the loss owner's state and hand it out; collective over the pipeline.

    Args:
        module: The user's module.
        names: Qualified names of the state that steps change.
        world: The state of the last stage; None on ranks that do not have it.
        groups: The pipeline's groups; None for one process.
        owner: Pipeline rank of the last stage.
    """
    if world is not None:
        world.commit()
    if groups is not None:
        exported = groups.broadcast(None if world is None else export_state(module, names), owner)
        if world is None:
            adopt_state(module, exported)
