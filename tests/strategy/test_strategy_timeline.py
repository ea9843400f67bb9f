"""What a user sees of measured steps: the timeline callback, the report, and ``auto`` planning again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from d9d_lightning import D9DStrategy
from d9d_lightning.errors import PipelineConfigurationError, PipelineStateError
from d9d_lightning.runtime.recorder import StepRecorder
from d9d_lightning.runtime.step_report import StepReport
from d9d_lightning.schedule import Costs, build_program, simulate
from d9d_lightning.schedule.families.auto import AutomaticProgramBuilder
from d9d_lightning.strategy import StepTimeline, programs
from d9d_lightning.strategy.measured import REPLAN_AFTER, MeasuredSteps, Replanner
from d9d_lightning.strategy.programs import Programs
from d9d_lightning.testing import run_distributed
from tests.strategy.strategy_cases import fit, make_loader, pipeline

SLOW = Costs(forward=[2, 4, 2, 4], backward_input=[1, 2, 1, 4], backward_weight=[2, 2, 4, 1])
MEASURED = (Costs([5, 2], [5, 1], [1, 5]), Costs([5, 1], [5, 1], [2, 2]))
"""What the ranks of the first and of any other pipeline are made to measure; each has another best order."""


def draw_steps(folder: str) -> dict[str, Any]:
    """Train with the callback; what this rank got to see."""
    callback = StepTimeline(folder, every_n_batches=3)
    _, trainer, seen = fit(pipeline(schedule="zbv"), devices=2, max_epochs=1, callbacks=[callback])
    report = callback.report
    return {"losses": seen.losses, "report": report, "batches": trainer.fit_loop.epoch_loop.total_batch_idx + 1}


def test_two_processes_draw_one_step_together(tmp_path: Path) -> None:
    """Both ranks get the same report of all actions of both, rank 0 writes the files, and losses are as without."""
    first, second = run_distributed(draw_steps, 2, (str(tmp_path),), init_group=False)
    report: StepReport = first["report"]
    assert report == second["report"] and first["batches"] == 4
    program = build_program("zbv", pp_size=2, num_microbatches=3)
    assert [[span.action for span in record.spans] for record in report.records] == [
        [str(action) for action in order] for order in program.actions
    ]
    assert all(figures.work > 0 and figures.wait >= 0 for figures in report.ranks)
    assert 0 <= report.slowest_stage < 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batch_3.json", "batch_3.svg", "batch_3.txt"]
    assert (tmp_path / "batch_3.txt").read_text() == report.text() + "\n"
    assert {event["pid"] for event in json.loads((tmp_path / "batch_3.json").read_text())["traceEvents"]} == {0, 1}
    assert first["losses"] == fit(pipeline(schedule="zbv"), max_epochs=1)[2].losses


def test_waiting_for_a_slow_rank_is_wait_and_not_work(tmp_path: Path) -> None:
    """One process, both ends of the measure: every action costs something, and alone nobody waits for a tensor."""
    callback = StepTimeline(tmp_path, every_n_batches=2, picture="html")
    fit(pipeline(schedule="1f1b"), max_epochs=1, callbacks=[callback])
    assert callback.report is not None
    (figures,) = callback.report.ranks
    assert figures.work > 100 * figures.wait
    assert (tmp_path / "batch_4.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"every_n_batches": 0}, "at least 1"), ({"picture": "gif"}, "svg, png, html")],
)
def test_arguments_of_the_callback_are_checked(arguments: dict[str, Any], message: str) -> None:
    """A wrong argument is named with what is allowed."""
    with pytest.raises(PipelineConfigurationError, match=message):
        StepTimeline(**arguments)


def test_the_callback_needs_the_strategy() -> None:
    """Under another strategy the callback says which one it is for, before training."""
    with pytest.raises(PipelineConfigurationError, match=r"SingleDeviceStrategy.*strategy=D9DStrategy"):
        fit("auto", max_epochs=1, callbacks=[StepTimeline()])


def test_a_report_before_any_step_is_refused() -> None:
    """Asking too early is an error that says when there is a report."""

    class Early(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.strategy.step_report()

    with pytest.raises(PipelineStateError, match="after a training batch"):
        fit(pipeline(), max_epochs=1, callbacks=[Early()])


def test_only_a_better_order_is_taken() -> None:
    """An order is taken if the measured costs call it faster, else the old one is kept; no stage ever moves."""
    auto = Programs("auto", 4)
    before = auto.training(8)
    assert auto.is_adaptable and "keeps" in auto.adapt(Costs(), 8)
    assert auto.training(8) is before
    assert "takes a new order" in auto.adapt(SLOW, 8)
    after = auto.training(8)
    assert simulate(after, SLOW).span < 0.99 * simulate(before, SLOW).span
    assert after.stage_to_rank == before.stage_to_rank == auto.training(6).stage_to_rank


def test_costs_of_ones_own_are_kept() -> None:
    """Neither a fixed schedule nor an ``auto`` that was given costs follows what is measured."""
    assert not Programs("zbv", 2).is_adaptable
    assert not Programs(AutomaticProgramBuilder(SLOW), 4).is_adaptable
    assert not Programs("auto", 1).is_adaptable


def train_with_auto(data_parallel: int) -> dict[str, Any]:
    """Train past the moment of planning again; the programs and losses of this rank, and what it measured."""
    orders: list[str] = []
    measured: list[Costs] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            report = trainer.strategy.step_report()
            orders.append(" ".join(span.action for record in report.records for span in record.spans))

    def costs(self: MeasuredSteps) -> Costs:
        measured.append(real(self))
        return MEASURED[min(1, torch.distributed.get_rank())]

    real, MeasuredSteps.costs = MeasuredSteps.costs, costs  # type: ignore[method-assign]
    gain, programs.SMALLEST_GAIN = programs.SMALLEST_GAIN, -1.0
    try:
        strategy = D9DStrategy(schedule="auto", num_microbatches=6, data_parallel_size=data_parallel)
        options = {"devices": 2 * data_parallel, "max_epochs": 4, "callbacks": [Watch()]}
        _, _, seen = fit(strategy, loader=make_loader(24 * data_parallel, 6), **options)
        replica = strategy.device_mesh["data_parallel"].get_local_rank()
    finally:
        MeasuredSteps.costs, programs.SMALLEST_GAIN = real, gain  # type: ignore[method-assign]
    return {"orders": orders, "losses": seen.losses, "measured": measured, "replica": replica}


def check_replanned(ranks: list[dict[str, Any]]) -> None:
    first, *others = ranks
    program = build_program(AutomaticProgramBuilder().with_costs(MEASURED[0]), pp_size=2, num_microbatches=6)
    fixed = build_program("auto", pp_size=2, num_microbatches=6)
    before, after = (" ".join(str(a) for order in p.actions for a in order) for p in (fixed, program))
    batches = len(first["orders"])
    assert batches > REPLAN_AFTER and before != after
    assert first["orders"] == [before] * REPLAN_AFTER + [after] * (batches - REPLAN_AFTER)
    assert all(other["orders"] == first["orders"] for other in others)
    assert len({(rank["replica"], tuple(rank["losses"])) for rank in ranks}) == len(ranks) // 2
    for rank in ranks:
        (costs,) = rank["measured"]
        assert all(time > 0 for kind in (costs.forward, costs.backward_input, costs.backward_weight) for time in kind)


def test_auto_plans_again_on_both_ranks_at_the_same_batch() -> None:
    """At the agreed batch both take the order for the first process's costs; losses stay those of one device."""
    ranks = run_distributed(train_with_auto, 2, (1,), init_group=False)
    check_replanned(ranks)
    assert ranks[0]["measured"] == ranks[1]["measured"]
    one = fit("auto", max_epochs=4, loader=make_loader(24, 6))[2].losses
    assert ranks[0]["losses"] == pytest.approx(one, abs=2e-6)


@pytest.mark.full
def test_replicas_plan_again_together() -> None:
    """Two pipelines measure different costs and run the same program afterwards."""
    check_replanned(run_distributed(train_with_auto, 4, (2,), init_group=False))


def test_a_deterministic_run_keeps_its_order() -> None:
    """Where the user asks for deterministic algorithms, no sum depends on the clock."""
    program_of = Programs("auto", 2)
    replanner = Replanner(program_of, MeasuredSteps(StepRecorder(0), None), None)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2 * REPLAN_AFTER):
            replanner.after_batch(6)
    finally:
        torch.use_deterministic_algorithms(False)
    with pytest.raises(PipelineStateError, match="no costs"):  # it would have looked
        other = Replanner(program_of, MeasuredSteps(StepRecorder(0), None), None)
        for _ in range(REPLAN_AFTER):
            other.after_batch(6)
