"""The orders that torch 2.13 runs, asked of torch itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from d9d_lightning.schedule import build_program

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

CASES = [
    ("LoopedBFS", "looped_bfs", 2),
    ("LoopedBFS", "looped_bfs", 3),
    ("Interleaved1F1B", "interleaved_1f1b", 1),
    ("Interleaved1F1B", "interleaved_1f1b", 2),
    ("Interleaved1F1B", "interleaved_1f1b", 3),
    ("InterleavedZeroBubble", "zb1p", 1),
    ("InterleavedZeroBubble", "zb1p", 2),
    ("InterleavedZeroBubble", "zb1p", 3),
    ("ZBVZeroBubble", "zbv", 2),
    ("DualPipeV", "dualpipev", 2),
]


def _torch_order(name: str, ranks: int, stages: int, microbatches: int) -> list[list[str]]:
    import torch

    count = ranks * stages
    vee = name in ("ZBVZeroBubble", "DualPipeV")
    hosted = [0, count - 1] if vee else range(0, count, ranks)
    mocks: list[Any] = [
        SimpleNamespace(
            group_size=ranks,
            group_rank=0,
            num_stages=count,
            stage_index=index,
            is_first=index == 0,
            is_last=index == count - 1,
            submod=torch.nn.Identity(),
            has_backward=True,
            device="cpu",
        )
        for index in hosted
    ]
    schedule = torch_schedules.get_schedule_class(name)(mocks, n_microbatches=microbatches, loss_fn=None)
    return [[str(a) for a in schedule.pipeline_order[rank] if a is not None] for rank in range(ranks)]


@pytest.mark.parametrize(("theirs", "ours", "stages"), CASES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_orders_equal_those_of_torch(theirs: str, ours: str, stages: int, ranks: int) -> None:
    """Families that torch has too run the same actions in the same order on every rank."""
    for microbatches in (2 * ranks, 3 * ranks, 4 * ranks):
        stages_per_rank = None if ours in ("zbv", "dualpipev") else stages
        program = build_program(ours, pp_size=ranks, num_microbatches=microbatches, stages_per_rank=stages_per_rank)
        mine = [list(map(str, order)) for order in program.compute_actions]
        assert mine == _torch_order(theirs, ranks, stages, microbatches)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 6])
def test_short_v_equals_that_of_torch(microbatches: int) -> None:
    """With fewer microbatches than its pattern needs, the V is cut short the way torch cuts it."""
    mine = [
        list(map(str, order))
        for order in build_program("zbv", pp_size=4, num_microbatches=microbatches).compute_actions
    ]
    assert mine == _torch_order("ZBVZeroBubble", 4, 2, microbatches)


@pytest.mark.parametrize("name", ["looped_bfs", "zbv", "dualpipev"])
def test_torch_reads_our_csv(name: str, tmp_path: Any) -> None:
    """The CSV that we write loads in torch's own schedule runtime as the same actions."""
    program = build_program(name, pp_size=2, num_microbatches=4)
    path = tmp_path / "program.csv"
    program.to_csv(path)
    rows = [line.split(",") for line in path.read_text().splitlines()]
    loaded = [[str(torch_schedules._Action.from_str(cell)) for cell in row] for row in rows]
    assert loaded == [list(map(str, order)) for order in program.compute_actions]
