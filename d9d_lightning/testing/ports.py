"""Where processes of a test meet."""

from __future__ import annotations

import random
import socket

__all__ = ["find_free_port"]

_drawn = random.SystemRandom()


def find_free_port() -> int:
    """A port of this host that nobody listens on.

    It lies outside of the range that systems give to outgoing connections, or one of those might take it before the
    process that was told of it listens.
    """
    while True:
        port = _drawn.randrange(15000, 30000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
