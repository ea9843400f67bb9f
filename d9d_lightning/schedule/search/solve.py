"""From a problem to an order: many starts, the best of them refined, always the same answer on every rank."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from d9d_lightning.schedule.search.blocks import V_HALF, V_MIN, arrange_blocks
from d9d_lightning.schedule.search.greedy import RULES, run_greedy
from d9d_lightning.schedule.search.improve import Candidate, evaluate, improve
from d9d_lightning.schedule.search.problem import EPSILON, OrderProblem, Sequences, mirror
from d9d_lightning.schedule.search.weave import WeaveOrder, Weaver

__all__ = ["find_order"]

# Effort is counted in clocked orders, never in seconds: every rank must come to the same order. Large programs are
# close to their bound already and each clocking takes longer, so they get fewer.
_EFFORT = 22e6
_MOST_TRIALS, _FEWEST_TRIALS = 10_000, 40
_SIZE_FOR_BLOCKS = 6_000
_SIZE_FOR_ALL_RULES = 4_000
_SIZE_FOR_ATTEMPTS, _MORE_ATTEMPTS, _NEAR_ENOUGH = 300, 2, 1.015
_SEED = 20_240_110
_ALLOWED_SHARES = (0.999, 0.97, 0.9, 0.8, 0.6, 0.4, 0.2)


def find_order(problem: OrderProblem, known: Iterable[Sequences], effort: float = 1.0) -> WeaveOrder | None:
    """Search for a good order.

    Args:
        problem: Costs, placement, memory limit and aim.
        known: Orders of fixed schedules of the same placement.
        effort: Multiple of the usual search effort.

    Returns:
        For every rank its whole order, or None if nothing fits in the memory limit.
    """
    weaver = Weaver(problem)
    starts = _rank_starts(weaver, [*known, *_propose(problem)])
    if not starts:
        return None
    best = _refine(weaver, starts, effort)
    return weaver.orders(best.sequences, best.allowance)


def _propose(problem: OrderProblem) -> Iterator[Sequences]:
    few = problem.num_actions > _SIZE_FOR_ALL_RULES
    for rule in RULES[:4] if few else RULES:
        order = run_greedy(problem, rule)
        if order is not None:
            yield order
            yield mirror(order)
    if problem.num_stages > problem.num_ranks and problem.num_actions <= _SIZE_FOR_BLOCKS and problem.num_ranks > 1:
        for block in (V_HALF, V_MIN):
            yield arrange_blocks(block, problem.num_ranks, problem.num_microbatches, int(problem.limit + EPSILON))


def _rank_starts(weaver: Weaver, proposals: Iterable[Sequences]) -> list[Candidate]:
    """Distinct orders that fit, best first."""
    problem = weaver.problem
    lengths = [2 * problem.num_microbatches * len(stages) for stages in problem.stages_of]
    seen: set[tuple[tuple[int, ...], ...]] = set()
    starts: list[Candidate] = []
    for sequences in proposals:
        key = tuple(map(tuple, sequences))
        if key in seen or [len(sequence) for sequence in sequences] != lengths:
            continue
        seen.add(key)
        candidate = evaluate(weaver, sequences)
        if candidate is not None:
            starts.append(candidate)
    return sorted(starts, key=lambda candidate: candidate.score)


def _refine(weaver: Weaver, starts: list[Candidate], effort: float) -> Candidate:
    """Search around the best starts; small problems that stay far from their bound get more attempts."""
    problem, rng = weaver.problem, random.Random(_SEED)
    trials = int(effort * min(_MOST_TRIALS, max(_FEWEST_TRIALS, _EFFORT / problem.num_actions**1.5)))
    pool = [_tune(weaver, candidate) for candidate in starts[:6]]
    best = _attempt(weaver, pool, trials, rng)
    for _ in range(_MORE_ATTEMPTS if problem.num_actions <= _SIZE_FOR_ATTEMPTS else 0):
        if best.score[0] <= problem.lower_bound * _NEAR_ENOUGH:
            break
        mirrored = evaluate(weaver, mirror(best.sequences))
        again = _attempt(weaver, [*pool, *([mirrored] if mirrored else [])], trials, rng)
        best = min(best, again, key=lambda candidate: candidate.score)
    return best


def _attempt(weaver: Weaver, pool: list[Candidate], trials: int, rng: random.Random) -> Candidate:
    """Several starts get a short search, the best of them longer ones."""
    for count, share, temperature in ((6, 0.3, 0.02), (3, 0.35, 0.01), (1, 0.35, 0.0)):
        pool = sorted(pool, key=lambda candidate: candidate.score)[:count]
        if pool[0].score[0] <= weaver.problem.lower_bound + EPSILON:
            break
        each = int(trials * share / len(pool))
        pool = [improve(weaver, candidate, each, temperature, rng) for candidate in pool]
    return min(pool, key=lambda candidate: candidate.score)


def _tune(weaver: Weaver, candidate: Candidate) -> Candidate:
    """Try idle allowances between nothing and everything."""
    best = candidate
    for share in _ALLOWED_SHARES:
        target = best.score[0]
        allowance = tuple(max(0.0, target - work) * share for work in weaver.problem.work)
        sequences = candidate.sequences[:]
        score = weaver.score(sequences, allowance, target)
        if score is not None and score < best.score:
            best = Candidate(score, sequences, allowance)
    return best
