"""Every schedule of the registry: whole, legal, free of deadlock, and readable."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from d9d_lightning.errors import ScheduleError
from d9d_lightning.schedule import SCHEDULES, Program, ScheduleStyle, build_program, check_program, legal_fallback

FIXED = [name for name in SCHEDULES if name != "auto"]
LOOPED = ("looped_bfs", "interleaved_1f1b", "zb1p")


def _rounds(ranks: int, microbatches: int) -> bool:
    return microbatches % max(1, microbatches // ranks) == 0


def _twice(ranks: int, microbatches: int) -> bool:
    return microbatches >= 2 * ranks


ALLOWED: dict[str, Callable[[int, int], bool]] = {
    "interleaved_1f1b": _rounds,
    "zb1p": _rounds,
    "zb_h2": _twice,
    "dualpipev": _twice,
}


def _check(name: str, ranks: int, microbatches: int, stages: int | None) -> None:
    if not ALLOWED.get(name, lambda *_: True)(ranks, microbatches):
        with pytest.raises(ValueError, match=name) as caught:
            build_program(name, pp_size=ranks, num_microbatches=microbatches, stages_per_rank=stages)
        assert f"pp_size={ranks}" in str(caught.value)
        assert f"num_microbatches={microbatches}" in str(caught.value)
        return
    program = build_program(name, pp_size=ranks, num_microbatches=microbatches, stages_per_rank=stages)
    check_program(program)
    assert (program.pp_size, program.num_microbatches) == (ranks, microbatches)
    assert Program.parse(program.text()) == program
    assert Program.from_csv(program.to_csv()) == program
    check_program(program.serialize())


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_every_size_gives_a_whole_program_or_one_clear_error(name: str, ranks: int) -> None:
    """A schedule either gives a whole, legal program that survives text and CSV, or an error with both numbers."""
    for microbatches in (1, 2, 3, 4, 7, 8, 11, 16, 24):
        _check(name, ranks, microbatches, None)


@pytest.mark.full
@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_size_of_the_whole_grid(name: str, ranks: int) -> None:
    """The promise of the small grid holds for every number of ranks to 8 and of microbatches to 24."""
    for microbatches in range(1, 25):
        _check(name, ranks, microbatches, None)


@pytest.mark.parametrize("name", LOOPED)
def test_looped_families_take_any_number_of_stages(name: str) -> None:
    """Looped families take one, two, three or four stages per rank, two by default."""
    for stages in (1, 2, 3, 4):
        _check(name, 3, 6, stages)
    assert build_program(name, pp_size=2, num_microbatches=4).num_stages == 4


@pytest.mark.parametrize("name", FIXED)
def test_no_microbatch_is_refused(name: str) -> None:
    """Every schedule refuses zero and negative numbers of microbatches with a ValueError."""
    for microbatches in (0, -1):
        with pytest.raises(ValueError, match=str(microbatches)):
            build_program(name, pp_size=2, num_microbatches=microbatches)
        with pytest.raises(ValueError, match=str(microbatches)):
            SCHEDULES[name]().compose(num_microbatches=microbatches, pp_size=2)


def test_a_wrong_number_of_stages_is_refused() -> None:
    """A schedule with a fixed number of stages per rank refuses another one and names those that take it."""
    with pytest.raises(ScheduleError, match=r"zbv.*has 2 stage.*stages_per_rank=3.*looped_bfs"):
        build_program("zbv", pp_size=2, num_microbatches=4, stages_per_rank=3)
    with pytest.raises(ScheduleError, match="at least 1 stage per rank, got 0"):
        build_program("looped_bfs", pp_size=2, num_microbatches=4, stages_per_rank=0)
    with pytest.raises(ScheduleError, match="'1f1b' has the loop placement, got v"):
        build_program("1f1b", pp_size=2, num_microbatches=4, style=ScheduleStyle.v)


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_fallback_has_the_same_placement(name: str, ranks: int) -> None:
    """For a number of microbatches that a schedule forbids, the fallback is legal and places stages the same way."""
    placement = build_program(name, pp_size=ranks, num_microbatches=2 * ranks).stage_to_rank
    for microbatches in range(1, 12):
        stages = 2 if name in LOOPED else None
        fallback = legal_fallback(name, ranks, microbatches, stages_per_rank=stages)
        kept = ALLOWED.get(name, lambda *_: True)(ranks, microbatches)
        assert (fallback == name) == kept
        program = build_program(fallback, pp_size=ranks, num_microbatches=microbatches, stages_per_rank=stages)
        assert program.stage_to_rank == placement


def test_evaluation_fits_every_training_schedule() -> None:
    """For every training schedule there is a forward-only program on its placement."""
    for name in FIXED:
        training = build_program(name, pp_size=4, num_microbatches=8)
        style = ScheduleStyle.v if training.stage_to_rank[-1] == 0 else ScheduleStyle.loop
        evaluation = build_program(
            "forward_only",
            pp_size=4,
            num_microbatches=5,
            stages_per_rank=training.num_stages // 4,
            style=style,
        )
        assert evaluation.stage_to_rank == training.stage_to_rank
        check_program(evaluation)
