"""Builds the parts of one run and connects them, in ``D9DStrategy.setup``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from d9d_lightning.strategy.compat import is_param_in_hook_signature
from d9d_lightning.strategy.data import STEP_OF, peek_batch
from d9d_lightning.strategy.engine import BatchPosition, Engine, find_sinks, split_batch
from d9d_lightning.strategy.loggers import loggers_routed
from d9d_lightning.strategy.mesh import Position, process_of_rank
from d9d_lightning.strategy.messages import Messenger
from d9d_lightning.strategy.options import StrategyOptions
from d9d_lightning.strategy.placement import PlacedModule, find_placed, read_ownership, remember_placed
from d9d_lightning.strategy.precision import step_context
from d9d_lightning.strategy.programs import Programs
from d9d_lightning.strategy.runtime_bridge import make_engine
from d9d_lightning.strategy.whole import Ownership
from d9d_lightning.strategy.world import World
from d9d_lightning.values import Microbatch

__all__ = [
    "SharedGroup",
    "agree_on_values",
    "agreed_seed",
    "make_messenger",
    "norm_weights",
    "place_module",
    "shared_groups",
]


def make_messenger(world: World, programs: Programs, device: torch.device) -> Messenger:
    """Messenger of this pipeline; its source is the process that owns the loss, the first one."""
    source = world.process_of(programs.loss_owner, programs.loss_owner)
    group = world.groups.pipeline_control if world.groups is not None and world.axes.pipeline > 1 else None
    return Messenger(group, source, world.position.pipeline == 0, device)


def agreed_seed(messenger: Messenger) -> int:
    """Seed of the random-number rule: the one the user set, as the loss owner has it."""
    return int(messenger.share(lambda: torch.initial_seed() % 2**63))


def place_module(
    trainer: Trainer,
    module: LightningModule,
    options: StrategyOptions,
    world: World,
    programs: Programs,
    messenger: Messenger,
) -> PlacedModule:
    """Decide which rank every unit lives on, once in the life of a module; collective the first time."""
    known = find_placed(module, programs.size, programs.stage_to_rank)
    if known is not None:
        return known
    rank = world.pipeline_rank(programs.loss_owner)
    engine = make_engine(
        module,
        world=world,
        programs=programs,
        rank=rank,
        options=options,
        sinks=find_sinks(module),
        device=messenger.device,
    )
    names = tuple(module.state_dict())
    step, microbatches = _sample(trainer, module, options, programs)
    placement = engine.place(step, microbatches)
    placed = PlacedModule(engine, placement, read_ownership(engine, rank), names, programs.size, programs.stage_to_rank)
    remember_placed(module, placed)
    return placed


def _sample(
    trainer: Trainer, module: LightningModule, options: StrategyOptions, programs: Programs
) -> tuple[Any, Sequence[Microbatch]]:
    """The user's step, and the microbatches of one batch to trace it with; none where no batch can be had."""
    name = STEP_OF[trainer.state.fn]  # type: ignore[index]
    user_step = getattr(module, name)
    batch = options.example_batch if options.example_batch is not None else peek_batch(trainer, module)

    def step(microbatch: Microbatch) -> Any:
        before = module._current_fx_name
        module._current_fx_name = name
        try:
            with step_context(trainer.precision_plugin, name), loggers_routed(trainer):
                return user_step(*microbatch.args, **microbatch.kwargs)
        finally:
            module._current_fx_name = before

    if batch is None:
        return step, ()
    args = _step_arguments(trainer, module, name, batch)
    count = options.num_microbatches
    return step, split_batch(
        args,
        lambda size: programs.choose_num_microbatches(size) if isinstance(count, str) else count,
        spec=options.batch_spec,
        position=BatchPosition(0, 0, 0, 0, 0),
    )


def _step_arguments(trainer: Trainer, module: LightningModule, name: str, batch: Any) -> tuple[Any, ...]:
    args: list[Any] = [batch]
    step = getattr(module, name)
    if is_param_in_hook_signature(step, "batch_idx", min_args=2):
        args.append(0)
    loaders = {"validation_step": trainer.val_dataloaders, "test_step": trainer.test_dataloaders}.get(name)
    many = isinstance(loaders, (list, tuple, dict)) and len(loaders) > 1
    if many and is_param_in_hook_signature(step, "dataloader_idx", min_args=3):
        args.append(0)
    return tuple(args)


SharedGroup = tuple[ProcessGroup, tuple[str, ...]]
"""Processes that share parameters, and the names of those."""


def agree_on_values(module: nn.Module, ownership: Ownership, world: World, shared: Sequence[SharedGroup]) -> None:
    """Give all holders of a tensor the same values; collective.

    Scripts that set no seed build another module in every process. Replicas take the values of the first one, owners of
    a shared parameter those of the lowest process.

    Args:
        module: The user's module, not yet released.
        ownership: What this rank holds.
        world: The processes.
        shared: Groups of owners.
    """
    parameters = dict(module.named_parameters())
    tensors = {**parameters, **dict(module.named_buffers())}
    with torch.no_grad():
        if world.groups is not None and world.axes.data > 1:
            for name in sorted(ownership.held):
                _broadcast(tensors[name], world.groups.replicas[0], world.groups.data_gradients)
        for group, names in shared:
            for name in names:
                _broadcast(parameters[name], min(dist.get_process_group_ranks(group)), group)


def _broadcast(tensor: Tensor, source: int, group: ProcessGroup) -> None:
    if tensor.is_meta or not tensor.numel():
        return
    whole = tensor.detach().contiguous()
    dist.broadcast(whole, source, group=group)
    tensor.detach().copy_(whole)


def shared_groups(world: World, programs: Programs, owners: Mapping[str, tuple[int, ...]]) -> list[SharedGroup]:
    """A group for every set of pipeline ranks that shares parameters; collective over the world."""
    if world.groups is None:
        return []
    by_set: dict[tuple[int, ...], list[str]] = {}
    for name, ranks in sorted(owners.items()):
        if len(ranks) > 1:
            by_set.setdefault(tuple(sorted(ranks)), []).append(name)
    found = []
    for ranks, names in sorted(by_set.items()):
        processes = [process_of_rank(rank, world.axes.pipeline, programs.loss_owner) for rank in ranks]
        for data, tensor in product(range(world.axes.data), range(world.axes.tensor)):
            members = sorted(world.axes.global_rank(Position(process, data, tensor)) for process in processes)
            # by all processes: local creation names a group after how many its process has, and these differ here
            group = dist.new_group(members)
            if dist.get_rank() in members:
                found.append((group, tuple(names)))
    return found


def norm_weights(engine: Engine, owned: Mapping[str, Tensor], rank: int) -> dict[Tensor, float]:
    """A parameter that several ranks share counts on the one that saves it."""
    return {
        parameter: 0.0
        for name, parameter in owned.items()
        if len(engine.parameter_owners[name]) > 1 and engine.parameter_owners[name][0] != rank
    }
