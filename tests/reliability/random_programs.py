"""Random programs that are legal, and a one-process pipeline whose ranks are delayed at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from d9d_lightning.errors import ScheduleDeadlockError
from d9d_lightning.runtime.executor import PipelineExecutor
from d9d_lightning.schedule import ActionBase, Program
from d9d_lightning.schedule.actions import parse_action
from d9d_lightning.testing.mailbox import Mailbox
from d9d_lightning.testing.pipeline import LocalPipeline, LocalRun, _can_run, _without


def draw_placement(generator: random.Random, ranks: int, stages: int) -> tuple[int, ...]:
    """Any rank for any stage, as long as no rank is idle."""
    hosts = [*range(ranks), *(generator.randrange(ranks) for _ in range(stages - ranks))]
    generator.shuffle(hosts)
    return tuple(hosts)


def draw_program(generator: random.Random) -> Program:
    """A legal program of random size, placement, order and kind of backward, unlike any schedule."""
    ranks, microbatches = generator.randint(1, 4), generator.randint(1, 5)
    stages = generator.randint(ranks, 6)
    placement = draw_placement(generator, ranks, stages)
    waiting = {
        rank: [(stage, mb) for stage in range(stages) if placement[stage] == rank for mb in range(microbatches)]
        for rank in range(ranks)
    }
    split = {(stage, mb): generator.random() < 0.5 for stage in range(stages) for mb in range(microbatches)}
    done: set[str] = set()
    orders: list[list[ActionBase]] = [[] for _ in range(ranks)]
    eager = [generator.random() for _ in range(ranks)]
    while any(waiting.values()):
        rank = generator.choice([rank for rank in range(ranks) if waiting[rank]])
        ready = [text for cell in waiting[rank] for text in _ready(cell, stages, split[cell], done)]
        if not ready:
            continue
        forwards = [text for text in ready if "F" in text]
        # how soon a rank runs ahead is its own habit, so that deep and shallow programs come up
        chosen = generator.choice(forwards if forwards and generator.random() < eager[rank] else ready)
        done.add(chosen)
        orders[rank].append(parse_action(chosen))
        waiting[rank] = [cell for cell in waiting[rank] if not _is_over(cell, done)]
    return Program.from_compute_actions(orders, placement, microbatches, "random")


def _ready(cell: tuple[int, int], stages: int, split: bool, done: set[str]) -> list[str]:
    stage, mb = cell
    forward, full, first, second = (f"{stage}{kind}{mb}" for kind in "FBIW")
    if forward not in done:
        return [forward] if stage == 0 or f"{stage - 1}F{mb}" in done else []
    later = stage == stages - 1 or bool({f"{stage + 1}B{mb}", f"{stage + 1}I{mb}"} & done)
    if not split:
        return [full] if later else []
    if first not in done:
        return [first] if later else []
    return [second]


def _is_over(cell: tuple[int, int], done: set[str]) -> bool:
    return bool({f"{cell[0]}B{cell[1]}", f"{cell[0]}W{cell[1]}"} & done)


class DelayedPipeline(LocalPipeline):
    """At every moment any rank that can go on may be the next, and may stop again after any action.

    Args:
        module: The module.
        generator: Draws who is next.
    """

    def __init__(self, module: nn.Module, generator: random.Random) -> None:
        super().__init__(module)
        self._generator = generator

    def _run_interleaved(
        self,
        executors: Sequence[PipelineExecutor],
        absent: Sequence[Any],
        program: Program,
        mailbox: Mailbox,
        result: LocalRun,
    ) -> None:
        left = [list(executor.actions) for executor in executors]
        while any(left):
            able = [rank for rank, rest in enumerate(left) if rest and _can_run(rest[0], program, mailbox)]
            if not able:
                raise ScheduleDeadlockError(f"every rank waits: {[str(rest[0]) for rest in left if rest]}")
            rank = self._generator.choice(able)
            with _without(absent[rank]):
                executors[rank].execute(left[rank].pop(0))


class Crossing(nn.Module):
    """Something for every stage to hand on: a long skip, a tied matrix, a parameter outside of units, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        self.split = nn.Linear(6, 12)
        self.scale = nn.Parameter(torch.ones(6))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        x = first = self.table(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale
        left, right = self.split(x).chunk(2, dim=-1)
        logits = (left + first * right.sigmoid()) @ self.table.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
