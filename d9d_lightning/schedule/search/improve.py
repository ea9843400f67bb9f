"""Local search: move an action, keep the order if it is no worse, and let what counts as no worse shrink."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from d9d_lightning.schedule.search.problem import EPSILON, OrderProblem, Sequences
from d9d_lightning.schedule.search.weave import Score, Weaver

__all__ = ["Candidate", "evaluate", "improve"]

_STEPS = (1, 1, 2, 3, 4, -1, -1, -2, -3)
_CHAIN_MOVES, _SWAPS, _NEW_ALLOWANCES = 0.3, 0.2, 0.2
_SWAP_REACH = 8


@dataclass(frozen=True)
class Candidate:
    """An order with the idle allowance that weaves it best.

    Attributes:
        score: What the weaver says.
        sequences: Forwards and input gradients of every rank.
        allowance: Idle time that each rank is allowed.
    """

    score: Score
    sequences: Sequences
    allowance: tuple[float, ...]


def evaluate(weaver: Weaver, sequences: Sequences) -> Candidate | None:
    """Weave an order with no idle allowance and with all of it; the better one, or None if it does not fit."""
    ranks = weaver.problem.num_ranks
    best: Candidate | None = None
    for allowance in ((0.0,) * ranks, (math.inf,) * ranks):
        woven = sequences[:]
        score = weaver.score(woven, allowance)
        if score is not None and (best is None or score < best.score):
            best = Candidate(score, woven, allowance)
    return best


def improve(weaver: Weaver, start: Candidate, trials: int, temperature: float, rng: random.Random) -> Candidate:
    """Search around a candidate.

    Args:
        weaver: Clock of the problem.
        start: Where to begin.
        trials: Number of orders to clock.
        temperature: Share by which an order may be worse at first; it falls to zero.
        rng: Source of all choices; a seeded one gives every rank the same order.

    Returns:
        The best candidate met.
    """
    problem = weaver.problem
    current = best = start
    for trial in range(trials):
        if best.score[0] <= problem.lower_bound + EPSILON:
            break
        sequences = _move(problem, current.sequences, rng)
        if sequences is None:
            continue
        allowance = current.allowance if rng.random() > _NEW_ALLOWANCES else _allow(problem, best.score[0], rng)
        slack = 1.0 + temperature * (1.0 - trial / trials)
        worst = (current.score[0] * slack, current.score[1] * slack)
        score = weaver.score(sequences, allowance, worst[0])
        if score is not None and (score <= current.score or (score[0] <= worst[0] and score[1] <= worst[1])):
            current = Candidate(score, sequences, allowance)
            if score < best.score:
                best = current
    return best


def _allow(problem: OrderProblem, target: float, rng: random.Random) -> tuple[float, ...]:
    """No allowance, all of it, or a share of what would still meet the target."""
    choice = rng.randrange(3)
    if choice < 2:
        return ((0.0, math.inf)[choice],) * problem.num_ranks
    return tuple(max(0.0, target - work) * rng.random() for work in problem.work)


def _move(problem: OrderProblem, sequences: Sequences, rng: random.Random) -> Sequences | None:
    """A changed copy, or None if the move changes nothing."""
    kind = rng.random()
    if kind < _CHAIN_MOVES:
        return _move_chain(problem, sequences, rng)
    rank = rng.randrange(len(sequences))
    sequence = sequences[rank][:]
    here = rng.randrange(len(sequence))
    if kind < _CHAIN_MOVES + _SWAPS:
        there = min(len(sequence) - 1, here + rng.randrange(1, _SWAP_REACH))
        if sequence[here] == sequence[there]:
            return None
        sequence[here], sequence[there] = sequence[there], sequence[here]
    else:
        there = min(len(sequence) - 1, max(0, here + rng.choice(_STEPS)))
        sequence.insert(there, sequence.pop(here))
        if sequence == sequences[rank]:
            return None
    changed = sequences[:]
    changed[rank] = sequence
    return changed


def _move_chain(problem: OrderProblem, sequences: Sequences, rng: random.Random) -> Sequences:
    """Move one microbatch, in one direction, on several neighbouring stages at once."""
    direction, microbatch = rng.randrange(2), rng.randrange(problem.num_microbatches)
    first, step = rng.randrange(problem.num_stages), rng.choice(_STEPS)
    until = min(problem.num_stages, first + rng.randrange(2, problem.num_stages + 2))
    changed = sequences[:]
    for stage in range(first, until):
        rank = problem.rank_of[stage]
        if changed[rank] is sequences[rank]:
            changed[rank] = sequences[rank][:]
        sequence = changed[rank]
        here = _find(sequence, 2 * stage + direction, microbatch)
        sequence.insert(min(len(sequence) - 1, max(0, here + step)), sequence.pop(here))
    return changed


def _find(sequence: list[int], code: int, microbatch: int) -> int:
    position = -1
    for _ in range(microbatch + 1):
        position = sequence.index(code, position + 1)
    return position
