"""Pipelines of two, replicated twice: four processes equal one device on the same global batches."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from d9d_lightning import D9DStrategy
from d9d_lightning.strategy.programs import schedule_names
from d9d_lightning.testing import run_distributed
from tests.strategy.replicated_cases import (
    Outcome,
    TiedModel,
    assert_replicas_equal,
    make_loader,
    make_tokens,
    replicated,
    train,
)
from tests.strategy.strategy_cases import QUIET, Losses, largest_difference

ACCUMULATIONS, MICROBATCHES = (1, 3), (1, 2, 8)
ALL = list(product(ACCUMULATIONS, MICROBATCHES))
PAIRS = {"zbv": [(1, 8), (3, 2)], "1f1b": [(3, 1), (1, 2)], "zb1p": [(1, 2)], "dualpipev": [(3, 8)]}
"""Every pair of accumulation and number of microbatches, and of either with a kind of schedule."""


def run(schedule: str, cases: list[tuple[int, int]]) -> list[Outcome]:
    return [
        train(replicated(schedule=schedule, num_microbatches=microbatches), 4, 2, accumulate=accumulate)
        for accumulate, microbatches in cases
    ]


def compare(schedule: str, cases: list[tuple[int, int]]) -> None:
    """Four processes against one device, for every case; the norm against one device's too."""
    references = {accumulate: train("auto", 1, 1, accumulate=accumulate) for accumulate, _ in cases}
    ranks: list[list[Outcome]] = run_distributed(run, 4, (schedule, cases), timeout=240)
    for position, (accumulate, microbatches) in enumerate(cases):
        case = f"{schedule}, accumulate {accumulate}, {microbatches} microbatches"
        found, one = [rank[position] for rank in ranks], references[accumulate]
        assert len(one.norms) == 3
        assert largest_difference(one.state, found[0].state) < 1e-5, case
        assert found[0].loss == pytest.approx(one.loss, rel=1e-5), case
        assert len({rank.loss for rank in found}) == 1, case
        assert found[0].norms == pytest.approx(one.norms, rel=1e-5), case
        assert all(rank.norms == found[0].norms for rank in found), case
        assert_replicas_equal(found)


@pytest.mark.parametrize(
    "schedule", ["zbv", "1f1b", *(pytest.param(name, marks=pytest.mark.full) for name in ("zb1p", "dualpipev"))]
)
@pytest.mark.filterwarnings("ignore")
def test_replicated_pipelines_equal_one_device(schedule: str) -> None:
    """Parameters, loss and norm of clipped, accumulated AdamW steps are those of one device; replicas are bit-equal."""
    compare(schedule, PAIRS[schedule])


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", schedule_names())
@pytest.mark.filterwarnings("ignore")
def test_every_schedule_replicated_equals_one_device(schedule: str) -> None:
    """So with every schedule, accumulation 1 and 3, microbatches 1, 2 and 8; the norm depends on none of them."""
    compare(schedule, ALL)


def run_tied(schedules: list[str]) -> list[Outcome]:
    return [train(replicated(schedule=schedule, num_microbatches=2), 4, 2, steps=5) for schedule in schedules]


@pytest.mark.filterwarnings("ignore")
def test_tied_embeddings_stay_equal_on_all_their_owners() -> None:
    """After 5 steps every copy of a tied embedding has the same bits, and the value that one device computes."""
    one = train("auto", 1, 1, steps=5)
    schedules = ["1f1b", "zb_h1", "zbv"]
    ranks: list[list[Outcome]] = run_distributed(run_tied, 4, (schedules,), timeout=120)
    for position, schedule in enumerate(schedules):
        found = [rank[position] for rank in ranks]
        copies = [rank.own["embedding.weight"] for rank in found if "embedding.weight" in rank.own]
        # under a V placement the first and the last stage are one rank, and the copies one tensor
        assert len(copies) == (2 if schedule == "zbv" else 4), schedule
        assert all(torch.equal(copy, copies[0]) for copy in copies), schedule
        assert largest_difference(one.state, found[0].state) < 1e-5, schedule
        assert len(one.norms) == 5
        assert_replicas_equal(found)


def go_on(pipeline: int, replicas: int, path: str, start: str | None, epochs: int) -> list[float]:
    """Train up to an epoch on so many pipelines, or on one device, and save; gives the loss of every global batch."""
    L.seed_everything(5, verbose=False)
    devices, seen = pipeline * replicas, Losses()
    split = D9DStrategy(pipeline_parallel_size=pipeline, data_parallel_size=replicas, num_microbatches=2)
    trainer = L.Trainer(
        strategy=split if devices > 1 else "auto", devices=devices, max_epochs=epochs, callbacks=[seen], **QUIET
    )
    trainer.fit(TiedModel(), make_loader(make_tokens(48), 16, replicas), ckpt_path=start)
    trainer.save_checkpoint(path)
    return [metrics["loss_step"] for metrics in seen.metrics]


def launch(sizes: tuple[int, int], *arguments: Any) -> list[float]:
    devices = sizes[0] * sizes[1]
    if devices == 1:
        return go_on(*sizes, *arguments)
    ranks = run_distributed(go_on, devices, (*sizes, *arguments), init_group=False, timeout=120)
    assert all(losses == ranks[0] for losses in ranks)
    return ranks[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "second"),
    [((2, 1), (1, 2)), ((2, 1), (2, 2)), ((2, 2), (1, 1)), ((1, 2), (2, 1))],
    ids=lambda sizes: f"{sizes[0]}x{sizes[1]}",
)
@pytest.mark.filterwarnings("ignore")
def test_resuming_with_another_number_of_replicas_continues_the_unbroken_run(
    tmp_path: Path, first: tuple[int, int], second: tuple[int, int]
) -> None:
    """Losses, parameters and optimizer state after a change of data-parallel size are those of one unbroken device."""
    whole, half, end = (str(tmp_path / f"{name}.ckpt") for name in ("whole", "half", "end"))
    unbroken = go_on(1, 1, whole, None, 4)
    resumed = launch(first, half, None, 2) + launch(second, end, half, 4)
    assert resumed == pytest.approx(unbroken, abs=1e-5)
    ours, theirs = (torch.load(path, weights_only=True) for path in (end, whole))
    assert ours["global_step"] == theirs["global_step"] == 12
    assert largest_difference(ours["state_dict"], theirs["state_dict"]) < 1e-5
    assert ours["lr_schedulers"] == theirs["lr_schedulers"]
    mine, other = (file["optimizer_states"][0]["state"] for file in (ours, theirs))
    assert mine.keys() == other.keys()
    assert all(largest_difference(mine[key], other[key]) < 1e-5 for key in other)
