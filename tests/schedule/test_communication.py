"""Sends and receives: where they are, and that they cannot hang."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from d9d_lightning.errors import ScheduleError
from d9d_lightning.schedule import (
    SCHEDULES,
    ActionKind,
    Program,
    ScheduleStyle,
    add_communication_ops,
    build_program,
    build_stage_to_host_rank_topology,
    parse_action,
    simulate,
)
from d9d_lightning.schedule.rendezvous import run_with_rendezvous

FIXED = [name for name in SCHEDULES if name != "auto"]


def test_transfers_of_two_ranks_as_a_timetable() -> None:
    """A send follows what makes its tensors; a receive stands before what needs it or before the next transfer."""
    program = build_program("1f1b", pp_size=2, num_microbatches=2)
    assert program.text().splitlines()[1:] == [
        "0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1: 1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


def test_neighbours_on_one_rank_exchange_nothing() -> None:
    """At the turn of a V nothing is sent."""
    program = build_program("zbv", pp_size=4, num_microbatches=4)
    moved = {str(a) for order in program.actions for a in order if not a.kind.is_compute}
    assert "3SEND_F0" not in moved
    assert "4RECV_F0" not in moved
    assert "4SEND_B0" not in moved
    assert "3SEND_F0".replace("3", "2") in moved


@pytest.mark.parametrize("name", FIXED)
def test_all_ranks_agree_on_one_order_of_transfers(name: str) -> None:
    """For every pair of ranks both sides have their common transfers in the same order, even across directions."""
    program = build_program(name, pp_size=4, num_microbatches=8)
    for low in range(4):
        for high in range(low + 1, 4):
            assert _common(program, low, high) == _common(program, high, low)


def _common(program: Program, rank: int, peer: int) -> list[tuple[str, int, int]]:
    """Transfers of one rank with another, each as (direction, sending stage, microbatch)."""
    found = []
    for action in program.actions[rank]:
        if action.kind.is_compute:
            continue
        forwards = action.kind in (ActionKind.SEND_F, ActionKind.RECV_F)
        sends = action.kind in (ActionKind.SEND_F, ActionKind.SEND_B)
        other = action.stage + (1 if forwards == sends else -1)
        if program.stage_to_rank[other] == peer:
            sender = action.stage if sends else other
            found.append(("F" if forwards else "B", sender, action.microbatch))
    return found


def _random_program(rng: random.Random) -> Program:
    """A legal program in an order that no family would choose."""
    ranks, style = rng.randrange(2, 5), rng.choice(list(ScheduleStyle))
    stages, microbatches = ranks * rng.randrange(1, 4), rng.randrange(1, 5)
    placement = build_stage_to_host_rank_topology(ranks, stages, style)
    waiting = [f"{stage}F{i}" for stage in range(stages) for i in range(microbatches)]
    waiting += [f"{stage}{kind}{i}" for stage in range(stages) for i in range(microbatches) for kind in "IW"]
    done: set[str] = set()
    orders: list[list[str]] = [[] for _ in range(ranks)]
    while waiting:
        name = rng.choice([name for name in waiting if _is_ready(name, done, stages)])
        waiting.remove(name)
        done.add(name)
        orders[placement[int(re.match(r"\d+", name)[0])]].append(name)  # type: ignore[index]
    actions = [list(map(parse_action, order)) for order in orders]
    return Program.from_compute_actions(actions, list(placement.values()), microbatches)


def _is_ready(name: str, done: set[str], stages: int) -> bool:
    stage, kind, i = re.fullmatch(r"(\d+)([FIW])(\d+)", name).groups()  # type: ignore[union-attr]
    s = int(stage)
    if kind == "F":
        return s == 0 or f"{s - 1}F{i}" in done
    if kind == "W":
        return f"{s}I{i}" in done
    return f"{s}F{i}" in done and (s == stages - 1 or f"{s + 1}I{i}" in done)


def test_no_order_of_actions_makes_transfers_hang() -> None:
    """Random legal programs run through even if every transfer blocks both ranks and everything is in order."""
    rng = random.Random(5)
    for _ in range(150):
        run_with_rendezvous(_random_program(rng))


@pytest.mark.parametrize("name", FIXED)
def test_a_receive_blocks_nothing_that_does_not_need_it(name: str) -> None:
    """Even if every receive waited for its tensors on the spot, no rank would compute a moment later."""
    program = build_program(name, pp_size=4, num_microbatches=8)
    latest = _ends_with_waiting_receives(program)
    assert latest == pytest.approx([spans[-1][1] for spans in simulate(program).times])


def _ends_with_waiting_receives(program: Program) -> list[float]:
    """End of each rank if a receive occupies its rank until its tensors are there; sends are free."""
    position, now = [0] * program.pp_size, [0.0] * program.pp_size
    sent: dict[str, float] = {}
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(program.actions):
            while position[rank] < len(order):
                action = order[position[rank]]
                if action.kind in (ActionKind.RECV_F, ActionKind.RECV_B):
                    forwards = action.kind is ActionKind.RECV_F
                    source = f"{action.stage + (-1 if forwards else 1)}SEND_{'F' if forwards else 'B'}"
                    if source + str(action.microbatch) not in sent:
                        break
                    now[rank] = max(now[rank], sent[source + str(action.microbatch)])
                elif action.kind.is_compute:
                    now[rank] += sum(2.0 if part.kind is ActionKind.B else 1.0 for part in action.parts)
                else:
                    sent[str(action)] = now[rank]
                position[rank] += 1
                moved = True
    assert position == [len(order) for order in program.actions]
    return now


def test_a_receive_stands_before_its_consumer_or_before_another_transfer() -> None:
    """A receive is placed as late as the common order of transfers allows."""
    for name in FIXED:
        program = build_program(name, pp_size=4, num_microbatches=8)
        for order in program.actions:
            for action, following in itertools.pairwise(order):
                if action.kind in (ActionKind.RECV_F, ActionKind.RECV_B) and following.kind.is_compute:
                    assert action.stage in {part.stage for part in following.parts}
                    assert action.microbatch in {part.microbatch for part in following.parts}


def test_a_send_without_a_consumer_is_refused() -> None:
    """A forward whose output no later stage takes is an error that names what is missing."""
    orders = {0: [parse_action("0F0")], 1: []}
    with pytest.raises(ScheduleError, match="0F0 has no forward of microbatch 0 on stage 1"):
        add_communication_ops(compute_actions=orders, stage_to_rank={0: 0, 1: 1}, num_stages=2)


def test_wrong_ranks_and_stages_are_refused() -> None:
    """Ranks and stages must be numbered from zero without gaps."""
    with pytest.raises(ScheduleError, match=r"ranks 0, 1, ..., got \[1\]"):
        add_communication_ops({1: []}, {0: 0}, 1)
    with pytest.raises(ScheduleError, match=r"stages \[0\], expected 0 to 1"):
        add_communication_ops({0: []}, {0: 0}, 2)
