"""Recording a step, and setting it beside the simulation of its program."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from d9d_lightning.errors import PipelineConfigurationError, PipelineStateError
from d9d_lightning.runtime import recorder as recorder_module
from d9d_lightning.runtime.recorder import RecordedTransport, Span, StepRecord, StepRecorder
from d9d_lightning.runtime.step_picture import chrome_trace, draw_svg, write_step
from d9d_lightning.runtime.step_report import compare_step
from d9d_lightning.schedule import Costs, Program, build_program, simulate


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 10.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + 1000.0


class SlowTransport:
    """Every wait takes 2 seconds, everything else no time."""

    problem: Exception | None = None
    receives_ahead = 0

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.calls: list[str] = []

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name.startswith(("take", "finish")):
            self.clock.now += 2

    def __getattr__(self, name: str):
        return lambda *_: self._note(name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(recorder_module, "time", clock)
    return clock


class Loud:
    """A monitor that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def enter(self, action: object) -> None:
        self.told.append(f"enter {action}")

    def leave(self) -> None:
        self.told.append("leave")

    def report(self, error: BaseException) -> None:
        self.told.append(f"report {error}")


def run_step(clock: Clock, recorder: StepRecorder, program: Program, monitor: Loud | None = None) -> SlowTransport:
    """Rank 1's actions on the clock: computing takes 3 seconds, taking 2."""
    inner = SlowTransport(clock)
    transport = recorder.begin(inner, monitor)
    for action in program.actions[1]:
        recorder.enter(action)
        if action.kind.is_compute:
            transport.take_forward(action.stage, action.microbatch)
            clock.now += 3
        elif action.kind.name == "SEND_B":
            transport.send_backward(action.stage, action.microbatch, {})
        recorder.leave()
    transport.finish()
    return inner


def test_each_action_is_noted_with_its_wait_apart(clock: Clock) -> None:
    """Start, end and wait of every action are those of the clock, since the epoch, in order; the monitor hears all."""
    program = build_program("gpipe", pp_size=2, num_microbatches=1)
    recorder, monitor = StepRecorder(rank=1), Loud()
    inner = run_step(clock, recorder, program, monitor)
    recorder.end(program)
    assert recorder.program is program and recorder.latest == StepRecord(
        1,
        (
            Span("1RECV_F0", 1010.0, 1010.0, 0.0),
            Span("1F0", 1010.0, 1015.0, 2.0),
            Span("1B0", 1015.0, 1020.0, 2.0),
            Span("1SEND_B0", 1020.0, 1020.0, 0.0),
        ),
        final_wait=2,
    )
    assert recorder.latest.spans[1].work == 3
    assert inner.calls == ["take_forward", "take_forward", "send_backward", "finish"]
    recorder.report(KeyError("mine"))
    assert monitor.told.pop() == "report 'mine'"
    assert monitor.told == [text for action in program.actions[1] for text in (f"enter {action}", "leave")]


def test_a_step_that_did_not_go_well_leaves_the_record_of_the_last_good_one(clock: Clock) -> None:
    """Without ``end`` nothing is kept, and forward-only steps are not kept either."""
    program = build_program("gpipe", pp_size=2, num_microbatches=1)
    recorder = StepRecorder(rank=1)
    run_step(clock, recorder, program)
    recorder.end(program)
    good = recorder.latest
    run_step(clock, recorder, program)
    assert recorder.latest == good
    evaluation = build_program("forward_only", pp_size=2, num_microbatches=1)
    run_step(clock, recorder, evaluation)
    recorder.end(evaluation)
    assert recorder.latest == good and recorder.program is program


def test_the_latest_steps_of_a_program_are_kept(clock: Clock) -> None:
    """As many as asked for, oldest first, and those of another program apart."""
    one, other = (build_program("gpipe", pp_size=2, num_microbatches=count) for count in (1, 2))
    recorder = StepRecorder(rank=1, keep=3)
    for program in (one, one, other, one):
        run_step(clock, recorder, program)
        recorder.end(program)
    starts = [record.spans[0].start for record in recorder.records_of(one)]
    assert len(starts) == 2 and starts == sorted(starts)
    assert [len(record.spans) for record in recorder.records_of(other)] == [8]


def test_a_problem_of_the_transport_is_passed_on(clock: Clock) -> None:
    """What the transport finds wrong at the end of the step is what the executor gets to see."""
    inner = SlowTransport(clock)
    inner.problem = KeyError("late")
    transport = RecordedTransport(inner)
    transport.finish()
    assert transport.problem is inner.problem


def records_of(program: Program, costs: Costs) -> list[StepRecord]:
    """What a runtime without any loss would record: every rank waits until its simulated start."""
    simulation = simulate(program, costs)
    records = []
    for rank, actions in enumerate(program.actions):
        times = iter(simulation.times[rank])
        now, spans = 100.0, []
        for action in actions:
            if action.kind.is_compute:
                start, end = (100.0 + at for at in next(times))
                spans.append(Span(str(action), now, end, start - now))
                now = end
            else:
                spans.append(Span(str(action), now, now, 0.0))
        records.append(StepRecord(rank, tuple(spans)))
    return records


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbv", "zb1p", "dualpipev"])
def test_a_perfect_runtime_measures_what_is_predicted(schedule: str) -> None:
    """From records made by the simulator the report finds its costs, its step time, and equal bubbles."""
    program = build_program(schedule, pp_size=2, num_microbatches=8)
    stages = range(program.num_stages)
    costs = Costs([1.0 + s for s in stages], [2.0 + s for s in stages], [0.5 + s for s in stages])
    report = compare_step(program, records_of(program, costs)[::-1])
    assert report.span == pytest.approx(simulate(program, costs).span)
    for figures in report.ranks:
        assert figures.bubble == pytest.approx(figures.predicted_bubble)
        assert figures.wait >= 0
    assert list(report.costs.forward) == pytest.approx(costs.forward)
    assert report.slowest_stage == program.num_stages - 1
    assert report.simulation.span == pytest.approx(report.span)


def test_measured_costs_can_plan_the_next_step() -> None:
    """The costs of a report are accepted by the planner that searches a program for them."""
    program = build_program("zb1p", pp_size=2, num_microbatches=4)
    report = compare_step(program, records_of(program, Costs()))
    planned = build_program("auto", pp_size=2, num_microbatches=4, stages_per_rank=2, costs=report.costs)
    assert planned.num_stages == program.num_stages


def test_time_lost_by_the_runtime_shows_as_bubble_and_wait() -> None:
    """A second of waiting that the simulation does not have raises the measured bubble, not the costs."""
    program = build_program("1f1b", pp_size=2, num_microbatches=4)
    clean = compare_step(program, records_of(program, Costs()))
    slow = []
    for record in records_of(program, Costs()):
        *spans, last = record.spans
        slow.append(StepRecord(record.rank, (*spans, Span(last.action, last.start, last.end + 1, last.wait + 1))))
    report = compare_step(program, slow)
    assert report.costs == clean.costs
    assert report.bubble > clean.bubble and report.ranks[0].predicted_bubble == clean.ranks[0].predicted_bubble
    assert report.ranks[0].wait == pytest.approx(clean.ranks[0].wait + 1)


def test_wrong_records_are_named() -> None:
    """A missing rank and the record of another program are errors that say what to do."""
    program = build_program("1f1b", pp_size=2, num_microbatches=4)
    records = records_of(program, Costs())
    with pytest.raises(PipelineStateError, match="all_gather_object"):
        compare_step(program, records[:1])
    with pytest.raises(PipelineStateError, match="program that was run"):
        compare_step(build_program("gpipe", pp_size=2, num_microbatches=4), records)


def test_the_picture_shows_every_action_twice(tmp_path: Path) -> None:
    """SVG and Chrome trace hold each compute action once as measured and once as simulated, and are well-formed."""
    program = build_program("zbv", pp_size=2, num_microbatches=4)
    report = compare_step(program, records_of(program, Costs()))
    write_step(report, tmp_path / "traces" / "step_7.svg")
    titles = [e.text for e in ElementTree.parse(tmp_path / "traces" / "step_7.svg").iter() if e.tag.endswith("title")]
    num_actions = sum(map(len, program.compute_actions))
    assert len(titles) == 2 * num_actions
    events = json.loads((tmp_path / "traces" / "step_7.json").read_text())["traceEvents"]
    work = [event for event in events if event["ph"] == "X" and event["cat"] != "wait"]
    assert sorted((e["pid"], e["tid"]) for e in work) == sorted(
        (process, rank) for process in (0, 1) for rank, order in enumerate(program.compute_actions) for _ in order
    )
    assert draw_svg(report) == (tmp_path / "traces" / "step_7.svg").read_text()
    assert chrome_trace(report)["traceEvents"] == events


@pytest.mark.parametrize(("ending", "begins"), [(".png", b"\x89PNG"), (".html", b"<!DOCTYPE html>"), (".svg", b"<svg")])
def test_a_step_is_drawn_in_the_form_that_the_name_asks_for(tmp_path: Path, ending: str, begins: bytes) -> None:
    """PNG, HTML and SVG by the ending of the name; the page has the table too; another ending is refused."""
    program = build_program("1f1b", pp_size=2, num_microbatches=4)
    report = compare_step(program, records_of(program, Costs()))
    write_step(report, tmp_path / f"step{ending}")
    content = (tmp_path / f"step{ending}").read_bytes()
    assert content.startswith(begins)
    assert ending != ".html" or report.text().splitlines()[1].encode() in content
    with pytest.raises(PipelineConfigurationError, match=r"\.svg, \.png, \.html"):
        write_step(report, tmp_path / "step.gif")


def test_the_table_names_ranks_and_the_slowest_stage() -> None:
    """The readable report has a line for each rank and says which stage is slowest."""
    program = build_program("1f1b", pp_size=2, num_microbatches=4)
    text = compare_step(program, records_of(program, Costs(forward=[1, 5]))).text()
    assert "slowest stage 1" in text and len(text.splitlines()) == 4
