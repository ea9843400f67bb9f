"""Stream order of a reduction, shown with kernels that are slow enough to lose a race that nothing forbids."""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist

from d9d_lightning.gradients.plan import ReduceAxis
from d9d_lightning.gradients.reduction import Communicator

_CYCLES = 200_000_000
_ELEMENTS = 1 << 20


class PretendedPair(ReduceAxis):
    """One rank that divides as if there were two: the division shows whether the reduction came after the writes."""

    @property
    def size(self) -> int:
        """Number of ranks to divide by."""
        return 2


def check_on_cuda() -> None:
    """Write on two slow streams, reduce, read on a third; every value must be half of the one written last."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        axis = PretendedPair(dist.group.WORLD)
        buffer = torch.zeros(_ELEMENTS, device=device)
        writers = [torch.cuda.Stream(device), torch.cuda.Stream(device)]
        reader = torch.cuda.Stream(device)
        communicator = Communicator()
        # The first use of a communicator is slow enough to hide a race.
        communicator.start(buffer, (axis,), ()).wait()
        torch.cuda.synchronize()
        for round_number in range(1, 4):
            for half, writer in zip(buffer.chunk(2), writers, strict=True):
                with torch.cuda.stream(writer):
                    torch.cuda._sleep(_CYCLES)
                    half.fill_(float(round_number))
            reduction = communicator.start(buffer, (axis,), writers)
            with torch.cuda.stream(reader):
                reduction.wait()
                copied = buffer.clone()
            torch.cuda.synchronize()
            seen = copied.unique().tolist()
            if seen != [round_number / 2]:
                raise RuntimeError(
                    f"round {round_number}: expected {round_number / 2} everywhere, the reader saw {seen}: a write, "
                    "the division or the read came out of order"
                )
        communicator.release()
        dist.destroy_process_group()


def main() -> None:
    """Run the check, or say that a CPU has no streams."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    if parser.parse_args().device != "cuda":
        print("streams: skipped, a CPU has none")
        return
    check_on_cuda()
    print("streams: writers, reduction and reader are in order")


if __name__ == "__main__":
    main()
