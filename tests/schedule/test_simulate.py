"""The clock."""

from __future__ import annotations

import itertools

import pytest

from d9d_lightning.errors import ScheduleDeadlockError, ScheduleError
from d9d_lightning.schedule import Costs, Program, build_program, simulate


def test_a_small_run_by_hand() -> None:
    """Two ranks and two microbatches of 1F1B, clocked by hand with F = 1, B = 2 and a latency of 0.5."""
    run = simulate(build_program("1f1b", pp_size=2, num_microbatches=2), Costs(communication=0.5))
    assert [(rank, str(action), start, end) for rank, action, start, end in run.timeline] == [
        (0, "0F0", 0.0, 1.0),
        (0, "0F1", 1.0, 2.0),
        (0, "0B0", 5.0, 7.0),
        (0, "0B1", 8.0, 10.0),
        (1, "1F0", 1.5, 2.5),
        (1, "1B0", 2.5, 4.5),
        (1, "1F1", 4.5, 5.5),
        (1, "1B1", 5.5, 7.5),
    ]
    assert (run.span, run.cost) == (10.0, 10.0)
    assert run.bubble_rate == pytest.approx(0.4)
    assert [(idle.head, idle.inner, idle.tail) for idle in run.idle] == [(0.0, 4.0, 0.0), (1.5, 0.0, 2.5)]
    assert run.peak_activations == (2.0, 1.0)


def test_span_has_a_barrier_and_cost_has_none() -> None:
    """``span`` counts from the first start to the last end of all ranks, ``cost`` each rank by itself."""
    run = simulate(build_program("zbv", pp_size=4, num_microbatches=8))
    assert (run.span, run.cost) == (51.0, 48.0)
    assert run.bubble_rate == pytest.approx(3 / 51)
    assert run.bubble_rate_without_barrier == pytest.approx(0.0)


def test_latency_is_between_ranks_only() -> None:
    """The turn of a V costs no hop, the wrap-around of a loop costs one for every microbatch."""
    vee = simulate(build_program("zbv", pp_size=2, num_microbatches=1), Costs(communication=10.0))
    assert vee.span == 1 + 10 + 2 + 10 + 2 + 10 + 3 + 10 + 2
    loop = simulate(build_program("looped_bfs", pp_size=2, num_microbatches=1), Costs(communication=10.0))
    assert loop.span == 4 + 3 * 10 + 8 + 3 * 10


def test_costs_may_differ_between_stages() -> None:
    """A number per stage is taken for each kind; a wrong count is refused."""
    program = build_program("gpipe", pp_size=2, num_microbatches=1)
    assert simulate(program, Costs((1, 3), (1, 5), 2)).span == 1 + 3 + 7 + 3
    with pytest.raises(ScheduleError, match=r"Costs.forward has 3 numbers for 2 stages"):
        simulate(program, Costs((1, 2, 3)))
    with pytest.raises(ScheduleError, match=r"Costs.backward_input is -1"):
        Costs(backward_input=-1)
    with pytest.raises(ScheduleError, match="share, from 0 to 1"):
        Costs(held_for_weight=1.5)


def test_an_overlapped_pair_is_one_action_with_its_own_cost() -> None:
    """An overlapped pair takes its own time, by default that of its parts."""
    program = build_program("dualpipev", pp_size=2, num_microbatches=4)
    serial, fused = simulate(program), simulate(program, Costs(overlap=2.5))
    pairs = [end - start for _, action, start, end in fused.timeline if len(action.parts) > 1]
    assert set(pairs) == {2.5}
    assert fused.span < serial.span


def test_a_full_backward_may_have_its_own_cost() -> None:
    """A full backward takes as long as its two halves unless it is told otherwise."""
    program = build_program("gpipe", pp_size=1, num_microbatches=2)
    assert simulate(program).span == 6.0
    assert simulate(program, Costs(backward_full=1.5)).span == 5.0


def test_memory_follows_each_kind() -> None:
    """F holds an activation, I gives back what W does not need, W the rest, B everything; sizes differ by stage."""
    program = Program.from_csv("0F0,0F1,0I0,0I1,0W0,0W1")
    assert simulate(program, Costs(held_for_weight=0.25)).peak_activations == (2.0,)
    late = Program.from_csv("0F0,0I0,0F1,0I1,0W0,0W1")
    assert simulate(late, Costs(held_for_weight=0.25)).peak_activations == (1.25,)
    assert simulate(late).peak_activations == (2.0,)
    sized = Program.from_csv("0F0,1F0,1B0,0B0")
    assert simulate(sized, Costs(activation=(3.0, 0.5))).peak_activations == (3.5,)


def test_the_critical_path_explains_the_span() -> None:
    """The critical path starts first, ends last, and has no gaps but latency."""
    run = simulate(build_program("1f1b", pp_size=4, num_microbatches=8), Costs(1.0, 1.1, 0.7, 0.25))
    path = run.critical_path
    assert path[0][2] == run.begin
    assert path[-1][3] == run.end
    for (rank, _, _, end), (following, _, start, _) in itertools.pairwise(path):
        assert start - end == pytest.approx(0.0 if rank == following else 0.25)


def test_gradient_reduction_hides_behind_work_and_the_rest_is_exposed() -> None:
    """A stage's reduction starts after its last backward; what outlasts its rank is exposed, and so is a barrier."""
    program = Program.from_csv("0F0,1F0,1B0,0B0")
    assert simulate(program, Costs(gradient_reduction=(1.0, 2.0))).exposed_reduction == (1.0,)
    assert simulate(program, Costs(gradient_reduction=(1.0, 3.0))).exposed_reduction == (2.0,)
    run = simulate(program, Costs(gradient_reduction=(1.0, 3.0), optimizer_barrier=0.5))
    assert run.step_time == run.span + 2.0 + 0.5
    ranks = simulate(build_program("zbv", pp_size=4, num_microbatches=8), Costs(optimizer_barrier=None))
    assert ranks.step_time == ranks.cost


def test_a_deadlock_names_every_blocked_action() -> None:
    """A program that cannot run names for each rank the action it is stuck at."""
    text = "ranks=2 microbatches=2 placement=0,1\n0: 0F0 0B0 0F1 0B1\n1: 1F1 1B1 1F0 1B0\n"
    with pytest.raises(ScheduleDeadlockError, match=r"rank 0 is blocked at 0B0.*; rank 1 is blocked at 1F1"):
        simulate(Program.parse(text))


def test_an_incomplete_program_names_the_action() -> None:
    """A program without one of its actions is refused, not clocked."""
    with pytest.raises(ScheduleError, match="1B0"):
        simulate(Program.from_csv("0F0,0B0,1F0"))
