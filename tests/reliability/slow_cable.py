"""A cable between two network interfaces that delays and loses packets, for kernels that have no netem.

Both ends are TAP devices, whose frames this process carries from one to the other. Run as a program: ``python
slow_cable.py NAME NAME DELAY_MS LOSS_PERCENT``; it prints ``ready`` once both devices exist, and on SIGTERM how many
frames it carried and how many it lost.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import signal
import struct
import sys
import time

_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_LARGEST_FRAME = 2048


def open_device(name: str) -> int:
    """Make a TAP device; it lives as long as the descriptor, in whatever namespace it is moved to."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", name.encode(), _TAP_WITHOUT_HEADER))
    return descriptor


def carry(ends: tuple[int, int], delay_s: float, loss: float, stopped: list[bool]) -> tuple[int, int]:
    """Carry frames until told to stop; how many were carried, and how many lost."""
    generator = random.Random(0)
    under_way: list[tuple[float, int, int, bytes]] = []
    carried = lost = 0
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    while not stopped:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else 0.2
        for end in select.select(ends, [], [], min(wait, 0.2))[0]:
            frame = _read(end)
            if frame and generator.random() < loss:
                lost += 1
            elif frame:
                carried += 1
                heapq.heappush(under_way, (time.monotonic() + delay_s, carried, other[end], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            *_, end, frame = heapq.heappop(under_way)
            _write(end, frame)
    return carried, lost


def _read(end: int) -> bytes:
    try:
        return os.read(end, _LARGEST_FRAME)
    except OSError:  # the device is down
        return b""


def _write(end: int, frame: bytes) -> None:
    try:
        os.write(end, frame)
    except OSError:  # the cable is cut, or its queue is full: the frame is lost
        return


def main() -> None:
    """See the module."""
    stopped: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    ends = open_device(sys.argv[1]), open_device(sys.argv[2])
    print("ready", flush=True)
    carried, lost = carry(ends, float(sys.argv[3]) / 1e3, float(sys.argv[4]) / 100, stopped)
    print(f"carried {carried} frames, lost {lost}", flush=True)


if __name__ == "__main__":
    main()
