"""Bubble rates that the zero bubble papers print."""

from __future__ import annotations

import pytest

from d9d_lightning.schedule import Costs, build_program, simulate
from tests.schedule.published import ARXIV, ICLR, Row

# Clocking 32 ranks x 256 microbatches takes seconds; the large rows run with the exhaustive grid.
ROWS = [(row, scale) for rows, scale in ((ICLR, 1), (ARXIV, 2)) for row in rows]
SIZED = [
    pytest.param(row, scale, marks=[pytest.mark.full] if row.ranks * row.microbatches > 300 else [])
    for row, scale in ROWS
]


def _rate(name: str, row: Row, costs: Costs, stages: int | None = None) -> float:
    program = build_program(name, pp_size=row.ranks, num_microbatches=row.microbatches, stages_per_rank=stages)
    return simulate(program, costs, check=False).bubble_rate_without_barrier


@pytest.mark.parametrize(("row", "scale"), SIZED)
def test_fixed_schedules_have_the_published_rates(row: Row, scale: int) -> None:
    """1F1B, interleaved 1F1B (corrected), ZB-H1 and ZB-H2 have the published bubble rates to four decimals."""
    times = [scale * time for time in (row.forward, row.backward_input, row.backward_weight)]
    costs = Costs(*times, row.hop)
    chunks = Costs(*(time / row.chunks for time in times), row.hop)
    assert _rate("1f1b", row, costs) == pytest.approx(row.f1b1, abs=6e-5)
    assert _rate("interleaved_1f1b", row, chunks, row.chunks) == pytest.approx(row.interleaved, abs=6e-5)
    assert _rate("zb_h1", row, costs) == pytest.approx(row.h1, abs=6e-5)
    assert _rate("zb_h2", row, costs) == pytest.approx(row.h2, abs=6e-5)


@pytest.mark.parametrize(("row", "scale"), SIZED)
def test_auto_reaches_the_published_rates(row: Row, scale: int) -> None:
    """``auto`` is at or below ZB-1p, ZB-2p (one stage per rank) and ZB-V (a V) under the same memory limits."""
    costs = Costs(row.forward, row.backward_input, row.backward_weight, row.hop, row.held)
    limits = (row.ranks, 2 * row.ranks) if scale == 1 else (2 * row.ranks,)
    for limit, published in zip(limits, row.auto, strict=True):
        program = build_program(
            "auto",
            pp_size=row.ranks,
            num_microbatches=row.microbatches,
            costs=costs,
            stages_per_rank=scale,
            max_activations=limit,
        )
        run = simulate(program, costs, check=False)
        assert max(run.peak_activations) <= limit + 1e-6
        assert run.bubble_rate_without_barrier <= published + 0.0005
