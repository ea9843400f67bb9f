"""Is a program whole, in a legal order, and free of deadlock?"""

from __future__ import annotations

from collections import Counter

from d9d_lightning.errors import ScheduleError
from d9d_lightning.schedule.actions import ActionKind
from d9d_lightning.schedule.engine import run_in_order
from d9d_lightning.schedule.program import Program
from d9d_lightning.schedule.rendezvous import run_with_rendezvous

__all__ = ["check_program"]


def check_program(program: Program) -> None:
    """Check a program the way a distributed run would find out.

    Each stage runs each microbatch once: forward, then either a full backward or an input gradient followed by a
    weight gradient; or, in an evaluation program, forwards only. The ranks can run their actions in order without
    blocking each other for ever, even where a send blocks until its receive is posted.

    Raises:
        ScheduleError: Names the action that is missing, doubled, out of order, or on the wrong rank.
        ScheduleDeadlockError: Names the blocked action of each rank.
    """
    _check_ranks(program)
    _check_each_once(program)
    _check_order_on_ranks(program)
    try:
        _check_transfers_exist(program)
        run_with_rendezvous(program)
    except ScheduleError:
        # If the compute actions alone block each other, that is the better explanation.
        run_in_order(program.compute_actions, dict(enumerate(program.stage_to_rank)), lambda action: 1.0)
        raise


def _check_ranks(program: Program) -> None:
    if len(program.actions) != program.pp_size:
        raise ScheduleError(f"a program of {program.pp_size} ranks has action lists for {len(program.actions)}")
    empty = sorted(set(range(program.pp_size)) - set(program.stage_to_rank))
    if empty:
        raise ScheduleError(f"rank {empty[0]} hosts no stage; stage_to_rank is {program.stage_to_rank}")
    for rank, order in enumerate(program.actions):
        for part in (part for action in order for part in action.parts):
            if not 0 <= part.stage < program.num_stages or program.stage_to_rank[part.stage] != rank:
                raise ScheduleError(f"{part} is on rank {rank}, which does not host stage {part.stage}")
            if not 0 <= part.microbatch < program.num_microbatches:
                raise ScheduleError(f"{part} is beyond the {program.num_microbatches} microbatches of the program")


def _check_each_once(program: Program) -> None:
    counts = Counter(part for order in program.compute_actions for action in order for part in action.parts)
    doubled = next((part for part, count in counts.items() if count > 1), None)
    if doubled is not None:
        raise ScheduleError(f"{doubled} is in the program {counts[doubled]} times; each action belongs there once")
    present = {(part.kind, part.stage, part.microbatch) for part in counts}
    forward_only = all(kind is ActionKind.F for kind, _, _ in present)
    for stage in range(program.num_stages):
        for microbatch in range(program.num_microbatches):
            kinds = {kind for kind in _COMPUTE if (kind, stage, microbatch) in present}
            if kinds not in ((_EVALUATION,) if forward_only else _TRAINING):
                raise ScheduleError(_explain(stage, microbatch, kinds))


_COMPUTE = (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)
_EVALUATION = {ActionKind.F}
_TRAINING = ({ActionKind.F, ActionKind.B}, {ActionKind.F, ActionKind.I, ActionKind.W})


def _explain(stage: int, microbatch: int, kinds: set[ActionKind]) -> str:
    if ActionKind.F not in kinds:
        return f"{stage}F{microbatch} is missing from the program"
    if ActionKind.B in kinds:
        return f"{stage}B{microbatch} stands beside {stage}I{microbatch} or {stage}W{microbatch}; use B, or I and W"
    if ActionKind.I not in kinds:
        return f"{stage}I{microbatch} (or {stage}B{microbatch}) is missing from the program"
    return f"{stage}W{microbatch} is missing from the program"


def _check_order_on_ranks(program: Program) -> None:
    for rank, order in enumerate(program.compute_actions):
        seen: set[tuple[ActionKind, int, int]] = set()
        for part in (part for action in order for part in action.parts):
            before = {ActionKind.I: ActionKind.F, ActionKind.B: ActionKind.F, ActionKind.W: ActionKind.I}.get(part.kind)
            if before is not None and (before, part.stage, part.microbatch) not in seen:
                raise ScheduleError(
                    f"{part} comes before {part.stage}{before.name}{part.microbatch} on rank {rank}; swap them"
                )
            seen.add((part.kind, part.stage, part.microbatch))


def _check_transfers_exist(program: Program) -> None:
    counts = Counter(action for order in program.actions for action in order if not action.kind.is_compute)
    expected: set[str] = set()
    for order in program.compute_actions:
        for part in (part for action in order for part in action.parts):
            peer = part.stage + 1 if part.kind is ActionKind.F else part.stage - 1
            if part.kind is ActionKind.W or not 0 <= peer < program.num_stages:
                continue
            if program.stage_to_rank[peer] != program.stage_to_rank[part.stage]:
                letter = "F" if part.kind is ActionKind.F else "B"
                expected |= {f"{part.stage}SEND_{letter}{part.microbatch}", f"{peer}RECV_{letter}{part.microbatch}"}
    given = {str(action) for action in counts}
    for problem, names in (("missing from", expected - given), ("not needed by", given - expected)):
        if names:
            raise ScheduleError(f"{min(names)} is {problem} the program; use add_communication_ops")
    doubled = next((action for action, count in counts.items() if count > 1), None)
    if doubled is not None:
        raise ScheduleError(f"{doubled} is in the program twice")
