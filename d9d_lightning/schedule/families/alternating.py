"""One forward, one backward, in turn: what the families with one stage per rank have in common."""

from __future__ import annotations

from d9d_lightning.schedule.actions import ActionBase, backward_full, backward_input, backward_weight, forward

__all__ = ["alternate"]


def alternate(rank: int, num_microbatches: int, ahead: int, late: int | None = None) -> list[ActionBase]:
    """Order of one rank.

    Args:
        rank: The rank, which is its stage too.
        num_microbatches: Number of microbatches.
        ahead: Forwards before the first backward.
        late: Turns between an input gradient and its weight gradient; None for backwards in one piece.
    """
    ahead = min(ahead, num_microbatches)
    order: list[ActionBase] = [forward(rank, i) for i in range(ahead)]
    for i in range(num_microbatches):
        if i + ahead < num_microbatches:
            order.append(forward(rank, i + ahead))
        if late is None:
            order.append(backward_full(rank, i))
            continue
        order.append(backward_input(rank, i))
        if i >= late:
            order.append(backward_weight(rank, i - late))
    put_off = 0 if late is None else min(late, num_microbatches)
    order += [backward_weight(rank, i) for i in range(num_microbatches - put_off, num_microbatches)]
    return order
