"""Receives that are posted before the actions in front of them."""

from __future__ import annotations

import pytest

from d9d_lightning.runtime.early_receives import EarlyReceives
from d9d_lightning.schedule import ActionBase, ActionKind, build_program

RECEIVES = (ActionKind.RECV_F, ActionKind.RECV_B)
SENDS = (ActionKind.SEND_F, ActionKind.SEND_B)


def run(actions: tuple[ActionBase, ...], depth: int) -> list[ActionBase]:
    """What a rank does, in the order in which it does it."""
    done: list[ActionBase] = []
    early = EarlyReceives(actions, depth, done.append)
    for position, action in enumerate(actions):
        if not early.has_run(position):
            done.append(action)
    return done


@pytest.mark.parametrize("schedule", ["1f1b", "looped_bfs", "interleaved_1f1b", "zb1p", "zbv", "dualpipev", "v_min"])
@pytest.mark.parametrize("depth", [1, 3])
def test_receives_come_early_and_nothing_else_changes(schedule: str, depth: int) -> None:
    """Each receive runs once, in the program's order, before the actions in front of its own; all else stays."""
    program = build_program(schedule, pp_size=4, num_microbatches=8)
    for actions in program.actions:
        done = run(actions, depth)
        for receives in (True, False):
            kept = [[a for a in order if (a.kind in RECEIVES) is receives] for order in (done, actions)]
            assert kept[0] == kept[1]
        computed = [a for a in actions if a.kind not in RECEIVES + SENDS]
        for position, action in enumerate(actions):
            if action.kind in RECEIVES:
                owner = next(a for a in actions[position:] if a in computed)
                turn = computed.index(owner)
                earliest = computed[max(0, turn - depth)]
                assert done.index(action) < done.index(earliest) or not turn


def test_no_receive_is_early_where_it_could_block() -> None:
    """A transport that allows no early receives sees the program as it is written."""
    (actions, _) = build_program("zbv", pp_size=2, num_microbatches=4).actions
    assert run(actions, 0) == list(actions)
