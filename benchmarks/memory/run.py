"""Resident memory of each process of a pipeline, next to that of one device.

    OMP_NUM_THREADS=1 python benchmarks/memory/run.py                 # 1.6 GB of parameters, gradients and AdamW states
    OMP_NUM_THREADS=1 python benchmarks/memory/run.py --width 512     # 0.4 GB

Linux only (``/proc/self``). README.md says what is measured and what was found.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

MEGABYTE = 2**20


def measure(ranks: int, width: int, build: str) -> list[dict[str, int]]:
    """What every process of one run found, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(__file__).with_name("job.py")
        done = subprocess.run(
            [sys.executable, str(script), str(ranks), str(width), build, folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stdout[-3000:])
        return [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    (one,) = measure(1, options.width, "memory")
    states = 4 * one["parameters"] / MEGABYTE
    print(
        f"parameters, gradients and AdamW states: {states:.0f} MB; embedding and head: "
        f"{one['ends'] / one['parameters']:.1%} of the parameters"
    )
    print("| run | rank | peak, MB | left after fit, MB | of one device's | saving, MB |")
    print("|---|---|---|---|---|---|")
    show("one device", 0, one, one)
    for build in ("memory", "meta"):
        for rank, found in enumerate(measure(options.ranks, options.width, build)):
            show(f"{options.ranks} ranks, built {'in memory' if build == 'memory' else 'on meta'}", rank, found, one)


def show(run: str, rank: int, found: dict[str, int], one: dict[str, int]) -> None:
    """One row."""
    peak, left, saving = (found[key] / MEGABYTE for key in ("peak", "left", "saving"))
    share = f"peak {found['peak'] / one['peak']:.0%}, left {found['left'] / one['left']:.0%}"
    print(f"| {run} | {rank} | {peak:.0f} | {left:.0f} | {share} | {saving:.0f} |", flush=True)


if __name__ == "__main__":
    main()
