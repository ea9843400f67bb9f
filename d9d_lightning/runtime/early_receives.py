"""Posting receives before the actions that stand in front of them.

A program names a receive right before the action that needs it. A message that finds no posted receive waits at its
sender, and then its whole way is time that the receiver waits. So while one action computes, the receives of the next
ones are posted already. The order of receives stays that of the program, since messages are matched by their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from d9d_lightning.schedule import ActionBase, ActionKind

__all__ = ["EarlyReceives"]

_TRANSFERS = frozenset({ActionKind.RECV_F, ActionKind.RECV_B, ActionKind.SEND_F, ActionKind.SEND_B})
_RECEIVES = frozenset({ActionKind.RECV_F, ActionKind.RECV_B})


class EarlyReceives:
    """The receives of one rank in one step.

    Args:
        actions: What the rank does, in order.
        depth: For how many of the actions after the one that is about to compute receives are posted. With 0 none is
            early.
        post: Runs the action of a receive.
    """

    def __init__(self, actions: Sequence[ActionBase], depth: int, post: Callable[[ActionBase], None]) -> None:
        self._actions = actions
        self._depth = depth
        self._post = post
        self._seen = 0
        self._computed = 0
        self._looked_at = 0

    def has_run(self, position: int) -> bool:
        """Called before every action, in order; posts what is due. Whether the action was a receive posted before."""
        kind = self._actions[position].kind
        if not self._depth or kind in _TRANSFERS:
            return kind in _RECEIVES and position < self._seen
        while self._seen < len(self._actions) and self._looked_at <= self._computed + self._depth:
            ahead = self._actions[self._seen]
            if ahead.kind in _RECEIVES and self._seen > position:
                self._post(ahead)
            elif ahead.kind not in _TRANSFERS:
                self._looked_at += 1
            self._seen += 1
        self._computed += 1
        return False
