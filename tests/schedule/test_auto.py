"""The schedule that looks at costs and memory."""

from __future__ import annotations

import random

import pytest

from d9d_lightning.errors import ScheduleError
from d9d_lightning.schedule import (
    SCHEDULES,
    Costs,
    Program,
    Simulation,
    build_program,
    check_program,
    simulate,
)
from d9d_lightning.schedule.families.auto import AutomaticProgramBuilder

# Optima proven by a constraint solver: ranks, microbatches, (F, I, W), limit, stages per rank, barrier, time.
CERTIFIED = [
    (4, 2, (1, 1, 1), 8, 2, False, 19),
    (4, 3, (1, 1, 1), 8, 2, False, 22),
    (4, 4, (1, 1, 1), 8, 2, False, 27),
    (4, 5, (1, 1, 1), 8, 2, False, 32),
    (4, 6, (1, 1, 1), 8, 2, False, 37),
    (4, 8, (1, 1, 1), 8, 2, False, 48),
    (4, 8, (2, 2, 1), 8, 2, False, 85),
    (4, 8, (2, 3, 2), 8, 2, False, 116),
    (4, 8, (3, 3, 2), 8, 2, False, 132),
    (4, 8, (1, 1, 1), 4, 2, True, 59),
    (4, 8, (1, 1, 1), 5, 2, True, 56),
    (4, 8, (1, 1, 1), 6, 2, True, 53),
    (4, 8, (1, 1, 1), 7, 2, True, 52),
    (4, 8, (1, 1, 1), 8, 2, True, 51),
    (4, 8, (2, 3, 2), 8, 2, True, 121),
    (4, 6, (1, 1, 1), 5, 2, False, 44),
    (4, 6, (2, 3, 2), 5, 2, False, 106),
    (3, 4, (2, 3, 2), 4, 2, False, 70),
    (2, 4, (2, 3, 2), 3, 2, True, 63),
    (2, 4, (2, 2, 1), 2, 1, False, 23),
    (4, 8, (1, 1, 1), 4, 1, False, 27),
    (4, 8, (1, 1, 1), 5, 1, False, 26),
    (4, 8, (1, 1, 1), 6, 1, False, 25),
    (4, 8, (1, 1, 1), 7, 1, False, 24),
    (4, 8, (2, 2, 1), 4, 1, False, 49),
    (4, 8, (2, 2, 1), 7, 1, False, 46),
    (4, 8, (3, 3, 2), 7, 1, False, 70),
]


def _time(run: Simulation, barrier: bool) -> float:
    return run.span if barrier else run.cost


QUICK = {CERTIFIED[at] for at in (0, 1, 2, 3, 5, 13, 18, 19, 20, 21, 22, 23)}


@pytest.mark.parametrize(
    ("ranks", "microbatches", "times", "limit", "stages", "barrier", "optimum"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.full]) for case in CERTIFIED],
)
def test_small_problems_are_solved(
    ranks: int,
    microbatches: int,
    times: tuple[int, int, int],
    limit: int,
    stages: int,
    barrier: bool,
    optimum: float,
) -> None:
    """Small problems come within two per cent of their proven optimum, under the memory limit."""
    costs = Costs(*times)
    program = build_program(
        "auto",
        pp_size=ranks,
        num_microbatches=microbatches,
        costs=costs,
        stages_per_rank=stages,
        max_activations=limit,
        barrier=barrier,
    )
    run = simulate(program, costs)
    assert max(run.peak_activations) <= limit
    assert _time(run, barrier) <= 1.02 * optimum


def _best_fixed(ranks: int, microbatches: int, stages: int, costs: Costs, limit: float, barrier: bool) -> float | None:
    times = []
    for name in SCHEDULES:
        if name in ("auto", "forward_only"):
            continue
        looped = stages if name in ("looped_bfs", "interleaved_1f1b", "zb1p") else None
        try:
            program = build_program(name, pp_size=ranks, num_microbatches=microbatches, stages_per_rank=looped)
        except ScheduleError:
            continue
        same_place = stages == 1 or program.stage_to_rank[-1] == 0
        if program.num_stages != stages * ranks or not same_place:
            continue
        run = simulate(program, costs, check=False)
        if max(run.peak_activations) <= limit + 1e-9:
            times.append(_time(run, barrier))
    return min(times, default=None)


def _never_worse(count: int, effort: float, seed: int) -> int:
    rng = random.Random(seed)
    compared = 0
    for _ in range(count):
        ranks, microbatches, stages = rng.randrange(1, 9), rng.randrange(1, 25), rng.choice((1, 2))
        times = [rng.choice((1.0, rng.uniform(0.3, 3))) for _ in range(3)]
        costs = Costs(
            *times,
            communication=rng.choice((0.0, rng.uniform(0, 0.5))),
            held_for_weight=rng.choice((1.0, rng.uniform(0.2, 1))),
            overlap=rng.choice((None, 0.8 * sum(times))),
        )
        limit = rng.choice((float(stages * ranks), rng.uniform(2, 2 * stages * ranks + 2)))
        barrier = rng.random() < 0.5
        builder = AutomaticProgramBuilder(costs, stages, limit, barrier, effort)
        program = build_program(builder, pp_size=ranks, num_microbatches=microbatches)
        check_program(program)
        run = simulate(program, costs, check=False)
        assert max(run.peak_activations) <= limit + 1e-6
        fixed = _best_fixed(ranks, microbatches, stages, costs, limit, barrier)
        if fixed is not None:
            compared += 1
            assert _time(run, barrier) <= fixed * (1 + 1e-9)
    return compared


def test_auto_is_never_worse_than_a_fixed_schedule() -> None:
    """Over random sizes, costs and limits, no fixed schedule of the placement within the limit beats ``auto``."""
    assert _never_worse(count=20, effort=0.02, seed=11) >= 10


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 110))
def test_auto_is_never_worse_than_a_fixed_schedule_in_500_cases(seed: int) -> None:
    """The promise of the small sample holds over 500 random sizes, costs and limits, here 50 of them."""
    assert _never_worse(count=50, effort=0.1, seed=seed) >= 30


def test_auto_repeats_itself() -> None:
    """The same question gets the same program, because every rank asks on its own."""
    orders = [
        AutomaticProgramBuilder(Costs(1.0, 1.2, 0.7, 0.1), 2, effort=scale).compose(num_microbatches=6, pp_size=4)
        for scale in (0.1, 0.1 + 1e-12)
    ]
    assert orders[0] == orders[1]


def test_auto_takes_the_placement_that_was_asked_for() -> None:
    """One stage per rank is a loop, two are a V, three are refused."""
    loop = build_program("auto", pp_size=2, num_microbatches=3)
    vee = build_program("auto", pp_size=2, num_microbatches=3, stages_per_rank=2)
    assert (loop.stage_to_rank, vee.stage_to_rank) == ((0, 1), (0, 1, 1, 0))
    assert Program.from_csv(vee.to_csv()) == vee
    with pytest.raises(ScheduleError, match=r"stages_per_rank=1 .loop. or 2 .V., got 3"):
        build_program("auto", pp_size=2, num_microbatches=3, stages_per_rank=3)


def test_auto_on_one_rank() -> None:
    """On one rank there is nothing to wait for, with one stage and with two."""
    for stages in (1, 2):
        program = build_program("auto", pp_size=1, num_microbatches=4, stages_per_rank=stages)
        check_program(program)
        assert simulate(program).bubble_rate == pytest.approx(0.0)


def test_a_limit_below_one_microbatch_is_refused() -> None:
    """A memory limit that not even one microbatch fits is an error that names it."""
    with pytest.raises(ScheduleError, match=r"at most 1 stage activations.*max_activations"):
        build_program("auto", pp_size=2, num_microbatches=3, stages_per_rank=2, max_activations=1)


def test_uneven_stages_are_taken_into_account() -> None:
    """With a heavy first stage ``auto`` is faster than every fixed V under the same limit."""
    times = (1.5, 1, 1, 1, 1, 1, 1, 1)
    costs = Costs(times, times, times, 0.1)
    builder = AutomaticProgramBuilder(costs, stages_per_rank=2, max_activations=8, effort=0.1)
    run = simulate(build_program(builder, pp_size=4, num_microbatches=4), costs)
    fixed = _best_fixed(4, 4, 2, costs, 8, barrier=False)
    assert fixed is not None
    assert run.cost < fixed - 1
