"""Bubble and memory formulas of the papers, on random costs."""

from __future__ import annotations

import functools
import random

import pytest

from d9d_lightning.schedule import Costs, Program, Simulation, build_program, simulate

RANKS = (2, 3, 4, 5, 8)


def _costs(rng: random.Random, *, small_weight: bool) -> tuple[float, float, float]:
    forward, inputs = rng.uniform(0.5, 3), rng.uniform(0.5, 3)
    weights = rng.uniform(0.1, 1) * min(forward, inputs) if small_weight else rng.uniform(0.5, 3)
    return forward, inputs, weights


def _run(name: str, ranks: int, microbatches: int, costs: tuple[float, float, float], stages: int = 1) -> Simulation:
    """Run with costs of a whole rank."""
    program = _build(name, ranks, microbatches, stages)
    return simulate(program, Costs(*(cost / stages for cost in costs)), check=False)


@functools.cache
def _build(name: str, ranks: int, microbatches: int, stages: int) -> Program:
    looped = stages if name in ("looped_bfs", "interleaved_1f1b", "zb1p") else None
    return build_program(name, pp_size=ranks, num_microbatches=microbatches, stages_per_rank=looped)


CASES = [
    ("gpipe", 1, False),
    ("1f1b", 1, False),
    ("looped_bfs", 2, False),
    ("looped_bfs", 3, False),
    ("interleaved_1f1b", 2, False),
    ("interleaved_1f1b", 3, False),
    ("zb_h1", 1, True),
    ("zb1p", 1, True),
    ("zb1p", 2, True),
    ("zb1p", 3, True),
]


@pytest.mark.parametrize(("name", "stages", "zero_bubble"), CASES)
def test_bubble_is_that_of_the_closed_form(name: str, stages: int, zero_bubble: bool) -> None:
    """On 200 random costs the bubble is (p - 1)(F + I + W) / v, or with split backwards (p - 1)(F + I - W) / v."""
    rng = random.Random(7)
    for _ in range(200):
        ranks = rng.choice(RANKS[:4])
        microbatches = ranks * rng.randrange(2, 4)
        forward, inputs, weights = costs = _costs(rng, small_weight=zero_bubble)
        run = _run(name, ranks, microbatches, costs, stages)
        per_rank = forward + inputs + (-weights if zero_bubble else weights)
        bubble = run.span - microbatches * (forward + inputs + weights)
        assert bubble == pytest.approx((ranks - 1) * per_rank / stages, abs=1e-9)
        if zero_bubble:
            assert run.cost == pytest.approx(run.span)


def test_zb_h2_bubble_without_a_barrier() -> None:
    """On 200 random costs ZB-H2 has a bubble of (p - 1)(F + I - 2W) without a barrier, and holds 2p - 1 activations."""
    rng = random.Random(8)
    for _ in range(200):
        ranks = rng.choice(RANKS[:4])
        forward, inputs, weights = costs = _costs(rng, small_weight=True)
        run = _run("zb_h2", ranks, 3 * ranks, costs)
        bubble = run.cost - 3 * ranks * (forward + inputs + weights)
        assert bubble == pytest.approx((ranks - 1) * (forward + inputs - 2 * weights), abs=1e-9)
        assert max(run.peak_activations) == 2 * ranks - 1


@pytest.mark.parametrize("ranks", RANKS)
def test_zbv_bubble_is_zero_for_equal_costs(ranks: int) -> None:
    """With F = I = W ZB-V has no bubble without a barrier, (p - 1)F / 2 with one, and p activations everywhere."""
    run = _run("zbv", ranks, 3 * ranks, (2.0, 2.0, 2.0), stages=2)
    assert run.cost == pytest.approx(3 * ranks * 6.0)
    assert run.span == pytest.approx(3 * ranks * 6.0 + (ranks - 1) * 2.0 / 2)
    assert run.peak_activations == (2.0 * ranks,) * ranks


def test_dualpipev_bubble_with_overlap() -> None:
    """On 200 random costs with F = I and W <= F, DualPipeV's worst rank idles (S / 2 - 1)(F&B + B - 3W)."""
    rng = random.Random(9)
    for _ in range(200):
        ranks, rounds = rng.choice(RANKS[:4]), rng.randrange(2, 4)
        forward = rng.uniform(0.5, 3)
        weights = forward * rng.uniform(0.1, 1)
        backward = forward + weights
        overlapped = (forward + backward) * rng.uniform(0.7, 1)
        program = _build("dualpipev", ranks, 2 * ranks * rounds, 2)
        run = simulate(program, Costs(forward, forward, weights, overlap=overlapped), check=False)
        idle = max(entry.head + entry.inner + entry.tail for entry in run.idle)
        assert idle == pytest.approx((ranks - 1) * (overlapped + backward - 3 * weights), abs=1e-9)
        assert max(run.peak_activations) == 2 * ranks + 1


@pytest.mark.parametrize(
    ("ranks", "microbatches"), [(3, 8), (4, 4), (4, 8), (5, 10), (6, 12), (7, 14), (8, 16), (8, 32)]
)
def test_v_half_span_and_memory(ranks: int, microbatches: int) -> None:
    """With F = I = W V-Half spans 3m + (6p - 1 - 3k) / 2 at a peak of (p + 2) // 2 activations, k stage activations."""
    run = _run("v_half", ranks, microbatches, (2.0, 2.0, 2.0), stages=2)
    peak = (ranks + 2) // 2
    assert max(run.peak_activations) == 2 * peak
    assert run.span == pytest.approx(2 * (3 * microbatches + (6 * ranks - 1 - 6 * peak) / 2))


@pytest.mark.parametrize(("ranks", "bubble"), [(3, 2.5), (4, 5.5), (5, 7.5), (7, 11.5), (8, 13.5)])
def test_v_min_span_and_memory(ranks: int, bubble: float) -> None:
    """With F = I = W V-Min has the published bubble (5.5 at p = 4, 13.5 at p = 8) at a peak of (p + 4) // 3."""
    for microbatches in (2 * ranks, 4 * ranks):
        run = _run("v_min", ranks, microbatches, (2.0, 2.0, 2.0), stages=2)
        assert max(run.peak_activations) == 2 * ((ranks + 4) // 3)
        assert run.span == pytest.approx(2 * (3 * microbatches + bubble))


@pytest.mark.parametrize("name", ["v_half", "v_min"])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_low_memory_schedules_keep_to_their_peak(name: str, ranks: int) -> None:
    """V-Half and V-Min hold at most (p + 2) // 2 and (p + 4) // 3 activations, for any number of microbatches."""
    limit = 2 * ((ranks + 2) // 2 if name == "v_half" else (ranks + 4) // 3)
    for microbatches in (1, 2, 3, 5, 8, 17):
        assert max(_run(name, ranks, microbatches, (2.0, 2.0, 2.0), stages=2).peak_activations) <= limit


@pytest.mark.parametrize(
    ("name", "stages", "spans", "peaks"),
    [
        ("gpipe", 1, (33, 69, 117), (8, 16, 32)),
        ("1f1b", 1, (33, 69, 117), (4, 8, 8)),
        ("looped_bfs", 2, (28.5, 58.5, 106.5), (8, 16, 32)),
        ("interleaved_1f1b", 2, (28.5, 58.5, 106.5), (5.5, 11.5, 11.5)),
        ("zb_h1", 1, (27, 55, 103), (4, 8, 8)),
        ("zb_h2", 1, (27, 55, 103), (7, 15, 15)),
        ("zb1p", 2, (25.5, 51.5, 99.5), (4, 8, 8)),
        ("zbv", 2, (25.5, 51.5, 99.5), (4, 8, 8)),
        ("dualpipev", 2, (27, 55, 103), (4.5, 8.5, 8.5)),
        ("v_half", 2, (26.5, 56.5, 104.5), (3, 5, 5)),
        ("v_min", 2, (29.5, 61.5, 109.5), (2, 4, 4)),
    ],
)
def test_unit_cost_table(name: str, stages: int, spans: tuple[float, ...], peaks: tuple[float, ...]) -> None:
    """With F = I = W = 1 span and peak are those known for 4 ranks x 8, 8 x 16 and 8 x 32 microbatches."""
    for (ranks, microbatches), span, peak in zip(((4, 8), (8, 16), (8, 32)), spans, peaks, strict=True):
        run = _run(name, ranks, microbatches, (1.0, 1.0, 1.0), stages)
        assert run.span == pytest.approx(span)
        assert max(run.peak_activations) / stages == pytest.approx(peak)


def test_dualpipev_taken_apart_is_shorter() -> None:
    """Where pairs cannot overlap, the serialized program sends each forward at once and spans 25.5 instead of 27."""
    program = build_program("dualpipev", pp_size=4, num_microbatches=8)
    assert simulate(program, Costs(0.5, 0.5, 0.5)).span == pytest.approx(27)
    assert simulate(program.serialize(), Costs(0.5, 0.5, 0.5)).span == pytest.approx(25.5)
