"""Actions, placements and programs."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from d9d_lightning.errors import ScheduleDeadlockError, ScheduleError
from d9d_lightning.schedule import (
    ActionKind,
    BackwardFullInputComputeAction,
    BackwardWeightComputeAction,
    ComposeAction,
    ForwardComputeAction,
    Program,
    ScheduleStyle,
    build_program,
    build_stage_to_host_rank_topology,
    check_program,
    choose_num_microbatches,
    legal_fallback,
    parse_action,
    predict_bubble,
)


@pytest.mark.parametrize(
    "text",
    ["2F0", "0B11", "12I3", "0W0", "2SEND_F0", "2RECV_F1", "2SEND_B0", "2RECV_B0", "(0F3;7B0)OVERLAP_F_B"],
)
def test_text_of_an_action_parses_back(text: str) -> None:
    """Every action prints as its text form and parses back to an equal one."""
    action = parse_action(text)
    assert str(action) == text
    assert action == parse_action(str(action))
    assert hash(action) == hash(parse_action(text))


def test_seed_keywords_make_actions() -> None:
    """The seed's classes take the seed's keywords and give the plain attributes of an executor."""
    action = BackwardFullInputComputeAction(stage_idx=2, microbatch_idx=5, full_backward=False)
    assert (action.kind, action.stage, action.microbatch, str(action)) == (ActionKind.I, 2, 5, "2I5")
    assert str(BackwardFullInputComputeAction(stage_idx=2, microbatch_idx=5, full_backward=True)) == "2B5"
    assert str(BackwardWeightComputeAction(stage_idx=1, microbatch_idx=0)) == "1W0"
    pair = ComposeAction((ForwardComputeAction(stage_idx=0, microbatch_idx=3), action))
    assert [str(part) for part in pair.parts] == ["0F3", "2I5"]


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "-1F0", "(0F1)OVERLAP_F_B", "(0F1;0SEND_F1)OVERLAP_F_B"])
def test_a_text_that_is_no_action_is_refused(text: str) -> None:
    """A text that is no action is an error that shows the form of one."""
    with pytest.raises(ScheduleError, match="action"):
        parse_action(text)


def test_placements() -> None:
    """A loop repeats the ranks, a V turns round after each run of ranks."""
    loop = build_stage_to_host_rank_topology(pp_size=3, num_stages=6, style=ScheduleStyle.loop)
    vee = build_stage_to_host_rank_topology(pp_size=3, num_stages=9, style=ScheduleStyle.v)
    assert list(loop.values()) == [0, 1, 2, 0, 1, 2]
    assert list(vee.values()) == [0, 1, 2, 2, 1, 0, 0, 1, 2]


def test_a_v_of_a_wrong_number_of_stages_is_refused() -> None:
    """A V needs a multiple of the number of ranks and the error names both numbers."""
    with pytest.raises(ScheduleError, match="7 stages on 3 ranks"):
        build_stage_to_host_rank_topology(pp_size=3, num_stages=7, style=ScheduleStyle.v)


def test_1f1b_holds_at_most_its_distance_from_the_end() -> None:
    """1F1B keeps at most pp_size - rank microbatches alive on every rank, for any number of microbatches."""
    for microbatches in (1, 2, 3, 5, 9):
        program = build_program("1f1b", pp_size=4, num_microbatches=microbatches)
        for rank, order in enumerate(program.compute_actions):
            alive = peak = 0
            for action in order:
                alive += 1 if action.kind is ActionKind.F else -1
                peak = max(peak, alive)
            assert peak == min(4 - rank, microbatches)


def test_one_rank_has_no_communication() -> None:
    """On one rank the V has two stages there and nothing to send."""
    program = build_program("zbv", pp_size=1, num_microbatches=3)
    assert program.stage_to_rank == (0, 0)
    assert all(action.kind.is_compute for action in program.actions[0])
    check_program(program)


def test_evaluation_takes_the_placement_of_training() -> None:
    """A forward-only program can be built for a V and for a loop of several stages per rank."""
    vee = build_program("forward_only", pp_size=2, num_microbatches=3, stages_per_rank=2, style=ScheduleStyle.v)
    assert vee.stage_to_rank == build_program("zbv", pp_size=2, num_microbatches=3).stage_to_rank
    loop = build_program("forward_only", pp_size=2, num_microbatches=3, stages_per_rank=2)
    assert loop.stage_to_rank == (0, 1, 0, 1)


@pytest.mark.parametrize("microbatches", [0, -3])
def test_no_microbatch_is_a_value_error(microbatches: int) -> None:
    """A number of microbatches below one is a ValueError that names it."""
    with pytest.raises(ValueError, match=str(microbatches)):
        build_program("zbv", pp_size=2, num_microbatches=microbatches)


def test_an_unknown_name_lists_the_names() -> None:
    """An unknown schedule name is answered with all names."""
    with pytest.raises(ScheduleError, match=r"zvb.*gpipe.*1f1b.*zbv"):
        build_program("zvb", pp_size=2, num_microbatches=2)


def _edit(program: Program, rank: int, old: str, new: str) -> Program:
    lines = program.text().splitlines()
    words = lines[rank + 1].split()
    at = words.index(old)
    words[at : at + 1] = new.split()
    lines[rank + 1] = " ".join(words)
    return Program.parse("\n".join(lines))


@pytest.mark.parametrize(
    ("rank", "old", "new", "message"),
    [
        (0, "0W1", "", "0W1 is missing"),
        (0, "0I1", "", "0I1.*is missing"),
        (1, "1F1", "1F1 1F1", "1F1 is in the program 2 times"),
        (0, "0W1", "0W7", "0W7 is beyond the 2 microbatches"),
        (0, "0W1", "1W1", "1W1 is on rank 0"),
        (0, "0SEND_F1", "", "0SEND_F1 is missing"),
        (0, "0SEND_F1", "0SEND_F1 0SEND_F1", "0SEND_F1 is in the program twice"),
        (0, "0I0", "0W0", "0W0"),
    ],
)
def test_a_broken_program_names_its_action(rank: int, old: str, new: str, message: str) -> None:
    """A missing, doubled, misplaced or foreign action is named by the checker."""
    program = build_program("zbv", pp_size=2, num_microbatches=2)
    with pytest.raises(ScheduleError, match=message):
        check_program(_edit(program, rank, old, new))


def test_a_weight_gradient_before_its_input_gradient_is_named() -> None:
    """An action that precedes what it needs on its own rank is named together with it."""
    program = _edit(build_program("zbv", pp_size=1, num_microbatches=1), 0, "0W0", "")
    with pytest.raises(ScheduleError, match="0W0 comes before 0I0"):
        check_program(_edit(program, 0, "0I0", "0W0 0I0"))


def test_a_deadlock_names_the_blocked_action_of_each_rank() -> None:
    """Ranks that wait for each other are reported with the action each one is stuck at."""
    rows = "0F0,0F1,0B1,0B0\n1F1,1B1,1F0,1B0"
    program = Program.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
    check_program(program)
    check_program(Program.from_csv(rows))
    with pytest.raises(ScheduleDeadlockError, match=r"rank 0 is blocked at 0B0 .*rank 1 is blocked at 1F1"):
        Program.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0")


def test_transfers_in_opposite_orders_deadlock() -> None:
    """Two ranks that take two transfers in opposite orders are found out by the rendezvous run."""
    text = (
        "ranks=2 microbatches=2 placement=0,1\n"
        "0: 0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "1: 1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1\n"
    )
    with pytest.raises(ScheduleDeadlockError, match=r"rank 0 is blocked at 0SEND_F1; rank 1 is blocked at 1RECV_F0"):
        check_program(Program.parse(text))


def test_fallbacks_keep_a_legal_schedule() -> None:
    """A schedule that takes the numbers is its own fallback."""
    assert legal_fallback("zbv", 4, 3) == "zbv"
    assert legal_fallback("1f1b", 4, 7) == "1f1b"


def test_automatic_number_of_microbatches() -> None:
    """The automatic number is the smallest multiple of the ranks below ten per cent bubble, within batch and 4 p."""
    assert (
        predict_bubble("zbv", pp_size=4, num_microbatches=8)
        < 0.1
        < predict_bubble("zbv", pp_size=4, num_microbatches=4)
    )
    assert choose_num_microbatches("zbv", pp_size=4, batch_size=64) == 8
    assert choose_num_microbatches("zbv", pp_size=4, batch_size=7) == 4
    assert choose_num_microbatches("gpipe", pp_size=4, batch_size=64) == 16
    assert choose_num_microbatches("gpipe", pp_size=4, batch_size=3) == 3
    assert choose_num_microbatches("zbv", pp_size=1, batch_size=8) == 1


def test_a_csv_with_idle_cells_is_read_from_text_and_file(tmp_path: Path) -> None:
    """The CSV that torch dumps, with empty cells where a rank idles, loads from its text and from a file."""
    rows = "0F0,0F1,,,0B0,,0B1\n,1F0,1B0,1F1,1B1,,\n"
    program = Program.from_csv(rows)
    path = tmp_path / "schedule.csv"
    path.write_text(rows)
    assert Program.from_csv(path) == Program.from_csv(str(path)) == program
    assert [list(map(str, order)) for order in program.compute_actions] == [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "1B0", "1F1", "1B1"],
    ]
    assert program.num_microbatches == 2
    check_program(program)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0F0,0B0\n0F1,0B1", "0F1 is on rank 1, but stage 0 began on rank 0"),
        ("0F0,0B0\n2F0,2B0", "no action of stage 1"),
        ("0F0,0SEND_F0\n1F0", "0SEND_F0; expected compute actions only"),
        ("0F0,0X0\n1F0", "'0X0' is no action"),
    ],
)
def test_a_wrong_csv_is_refused(rows: str, message: str) -> None:
    """A CSV that is no compute-only program is an error that names the cell."""
    with pytest.raises(ScheduleError, match=message):
        Program.from_csv(rows)


def test_a_text_that_is_no_program_is_refused() -> None:
    """A text without sizes is an error that shows the form of one."""
    with pytest.raises(ScheduleError, match="ranks=2 microbatches=4 placement=0,1"):
        Program.parse("0: 0F0")


def test_actions_are_values() -> None:
    """Actions cannot be changed, hash alike when equal, and survive pickling into a process with other hashes."""
    action = build_program("dualpipev", pp_size=2, num_microbatches=4).compute_actions[0][-5]
    with pytest.raises(AttributeError):
        action.stage_idx = 3  # type: ignore[attr-defined]
    pair = ComposeAction((ForwardComputeAction(0, 1), BackwardFullInputComputeAction(3, 0)))
    for entry in (action, pair):
        assert pickle.loads(pickle.dumps(entry)) == entry
    code = (
        "import pickle, sys; from d9d_lightning.schedule import parse_action\n"
        f"given = pickle.loads(bytes.fromhex({pickle.dumps(pair).hex()!r}))\n"
        f"sys.exit(given not in {{parse_action({str(pair)!r})}})"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, env=os.environ | {"PYTHONHASHSEED": "77"})
