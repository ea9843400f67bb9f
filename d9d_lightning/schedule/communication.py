"""Sends and receives, added to a program that only computes.

All transfers of a program get one global order, and the list of every rank respects it. So the earliest unfinished
transfer is always the next one on both of its ranks, and the program cannot deadlock, not even where sends block until
their receive is posted and everything is taken strictly in order.

The order is that of a clocked run (unlike one of plain rounds it knows that a full backward takes as long as an input
and a weight gradient). A send follows the action that makes its tensors. A receive is placed as late as the global
order allows: right before the action that needs it, or before the next transfer of its rank. Posting it earlier is the
executor's freedom, as long as the order of transfers stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from d9d_lightning.errors import ScheduleError
from d9d_lightning.schedule.actions import (
    ActionBase,
    ActionKind,
    parse_action,
)
from d9d_lightning.schedule.engine import Interval, run_in_order

__all__ = ["add_communication_ops"]

_NOMINAL = (1.0, 2.0, 1.0, 1.0)
"""Times of F, B, I and W."""


class _Transfer(NamedTuple):
    """One tensor hop; the fields before the actions are the key of the global order."""

    sent: float
    needed: float
    sender: int
    position: int
    receiver: int
    consumer: int
    send: ActionBase
    receive: ActionBase


def add_communication_ops(
    compute_actions: Mapping[int, Sequence[ActionBase]], stage_to_rank: Mapping[int, int], num_stages: int
) -> dict[int, list[ActionBase]]:
    """Add the sends and receives that a program of compute actions needs.

    Args:
        compute_actions: Rank to its compute actions, in order, for ranks 0, 1, ...
        stage_to_rank: Rank of every stage.
        num_stages: Number of stages.

    Returns:
        Rank to its actions with communication; nothing is added between stages of one rank.

    Raises:
        ScheduleError: Ranks are not 0, 1, ..., or ``stage_to_rank`` does not have ``num_stages`` stages.
        ScheduleDeadlockError: The compute actions cannot be run in this order.
    """
    if sorted(compute_actions) != list(range(len(compute_actions))):
        raise ScheduleError(f"a program needs the ranks 0, 1, ..., got {sorted(compute_actions)}")
    if sorted(stage_to_rank) != list(range(num_stages)):
        raise ScheduleError(f"stage_to_rank has the stages {sorted(stage_to_rank)}, expected 0 to {num_stages - 1}")
    orders = [list(compute_actions[rank]) for rank in range(len(compute_actions))]
    times = run_in_order(orders, stage_to_rank, _nominal_duration)
    transfers = sorted(_find_transfers(orders, times, stage_to_rank, num_stages), key=lambda transfer: transfer[:3])
    touching: list[list[_Transfer]] = [[] for _ in orders]
    for transfer in transfers:
        touching[transfer.sender].append(transfer)
        touching[transfer.receiver].append(transfer)
    return {rank: _merge(rank, order, touching[rank]) for rank, order in enumerate(orders)}


def _nominal_duration(action: ActionBase) -> float:
    if action.kind is ActionKind.OVERLAP:
        return sum(_NOMINAL[part.kind] for part in action.parts)
    return _NOMINAL[action.kind]


def _find_transfers(
    orders: Sequence[Sequence[ActionBase]],
    times: Sequence[Sequence[Interval]],
    stage_to_rank: Mapping[int, int],
    num_stages: int,
) -> list[_Transfer]:
    consumers: dict[tuple[bool, int, int], tuple[float, int]] = {}
    for order, spans in zip(orders, times, strict=True):
        for position, (action, (start, _)) in enumerate(zip(order, spans, strict=True)):
            for part in action.parts:
                if part.kind is not ActionKind.W:
                    consumers[part.kind is ActionKind.F, part.stage, part.microbatch] = (start, position)
    transfers = []
    for rank, (order, spans) in enumerate(zip(orders, times, strict=True)):
        for position, (action, (_, end)) in enumerate(zip(order, spans, strict=True)):
            for part in action.parts:
                is_forward = part.kind is ActionKind.F
                peer_stage = part.stage + 1 if is_forward else part.stage - 1
                if part.kind is ActionKind.W or not 0 <= peer_stage < num_stages or stage_to_rank[peer_stage] == rank:
                    continue
                consumer = consumers.get((is_forward, peer_stage, part.microbatch))
                if consumer is None:
                    direction = "forward" if is_forward else "backward"
                    raise ScheduleError(
                        f"{part} has no {direction} of microbatch {part.microbatch} on stage {peer_stage} to send to; "
                        "add that action to the program"
                    )
                send, receive = _actions_of(part, peer_stage)
                receiver = stage_to_rank[peer_stage]
                transfers.append(_Transfer(end, consumer[0], rank, position, receiver, consumer[1], send, receive))
    return transfers


def _actions_of(part: ActionBase, peer_stage: int) -> tuple[ActionBase, ActionBase]:
    letter = "F" if part.kind is ActionKind.F else "B"
    send = parse_action(f"{part.stage}SEND_{letter}{part.microbatch}")
    return send, parse_action(f"{peer_stage}RECV_{letter}{part.microbatch}")


def _merge(rank: int, order: Sequence[ActionBase], transfers: Sequence[_Transfer]) -> list[ActionBase]:
    """Weave the transfers of one rank, already in global order, into its compute actions."""
    before = [0] * len(order)
    after = [0] * len(order)
    for count, transfer in enumerate(transfers, start=1):
        if transfer.sender == rank:
            after[transfer.position] = count
        else:
            before[transfer.consumer] = count
    merged: list[ActionBase] = []
    emitted = 0

    def emit(until: int) -> None:
        nonlocal emitted
        for transfer in transfers[emitted:until]:
            merged.append(transfer.send if transfer.sender == rank else transfer.receive)
        emitted = max(emitted, until)

    for action, due_before, due_after in zip(order, before, after, strict=True):
        emit(due_before)
        merged.append(action)
        emit(due_after)
    return merged
