"""Pipelines of two, replicated twice: four processes equal one device on the same global batches."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from d9d_lightning.strategy.programs import schedule_names
from d9d_lightning.testing import run_distributed
from tests.strategy.replicated_cases import Outcome, assert_replicas_equal, replicated, train
from tests.strategy.strategy_cases import largest_difference

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
