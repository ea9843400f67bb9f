"""The strictest run of a program: every transfer blocks both of its ranks, and everything is taken in order."""

from __future__ import annotations

from d9d_lightning.errors import ScheduleDeadlockError, ScheduleError
from d9d_lightning.schedule.actions import ActionBase, ActionKind
from d9d_lightning.schedule.program import Program

__all__ = ["run_with_rendezvous"]

_SENDS = (ActionKind.SEND_F, ActionKind.SEND_B)


def run_with_rendezvous(program: Program) -> None:
    """Run a program with blocking sends and receives.

    Raises:
        ScheduleDeadlockError: Ranks wait for each other; names the blocked action of each rank.
        ScheduleError: A send precedes the action that makes its tensors.
    """
    run = _Run(program)
    while sum(run.advance(rank) for rank in range(program.pp_size)):
        pass
    blocked = [
        f"rank {rank} is blocked at {order[run.position[rank]]}"
        for rank, order in enumerate(program.actions)
        if run.position[rank] < len(order)
    ]
    if blocked:
        raise ScheduleDeadlockError("the transfers of the program deadlock: " + "; ".join(blocked))


class _Run:
    """How far each rank has come, and which tensors exist where."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.position = [0] * program.pp_size
        self.made: set[tuple[bool, int, int]] = set()
        self.received: set[tuple[bool, int, int]] = set()

    def advance(self, rank: int) -> bool:
        """Run a rank until it blocks; returns whether it moved."""
        order, start = self.program.actions[rank], self.position[rank]
        while self.position[rank] < len(order):
            action = order[self.position[rank]]
            if action.kind.is_compute:
                if not all(self._has_inputs(part) for part in action.parts):
                    break
                self.made |= {
                    (part.kind is ActionKind.F, part.stage, part.microbatch)
                    for part in action.parts
                    if part.kind is not ActionKind.W
                }
            elif not self._meet(action):
                break
            self.position[rank] += 1
        return self.position[rank] > start

    def _meet(self, action: ActionBase) -> bool:
        """Complete a transfer if its other side is at the head of its rank too; moves that rank on."""
        is_forward = action.kind in (ActionKind.SEND_F, ActionKind.RECV_F)
        is_send = action.kind in _SENDS
        peer_stage = action.stage + (1 if is_forward == is_send else -1)
        peer = self.program.stage_to_rank[peer_stage]
        order, position = self.program.actions[peer], self.position[peer]
        wanted = f"{peer_stage}{'RECV' if is_send else 'SEND'}_{'F' if is_forward else 'B'}{action.microbatch}"
        if position >= len(order) or str(order[position]) != wanted:
            return False
        sent, received = (action.stage, peer_stage) if is_send else (peer_stage, action.stage)
        if (is_forward, sent, action.microbatch) not in self.made:
            send = action if is_send else order[position]
            raise ScheduleError(f"{send} comes before the action that makes its tensors; use add_communication_ops")
        self.received.add((is_forward, received, action.microbatch))
        self.position[peer] += 1
        return True

    def _has_inputs(self, part: ActionBase) -> bool:
        """Whether the tensors of another stage are there; the order on one rank is checked before."""
        if part.kind is ActionKind.W:
            return True
        is_forward = part.kind is ActionKind.F
        source = part.stage + (-1 if is_forward else 1)
        if not 0 <= source < self.program.num_stages:
            return True
        if self.program.stage_to_rank[source] == self.program.stage_to_rank[part.stage]:
            return (is_forward, source, part.microbatch) in self.made
        return (is_forward, part.stage, part.microbatch) in self.received
