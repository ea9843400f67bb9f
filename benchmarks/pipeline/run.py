"""Step time of every schedule against one process, DDP and torch.distributed.pipelining.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/pipeline/run.py --case big --seconds 150
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/pipeline/run.py --case tiny --seconds 60

All runners are built first and then take turns; only ratios within a round are compared. ``--only zbv,1f1b`` keeps
some schedules. *ours* has stages split by hand, as torch's; *replay* replays a user's step on top of it. In the table
*CPU* is the main thread's time on the busiest rank over its share of one process, *CPU us* what that is more for each
(stage, microbatch), and a star marks ratios of which not all pairs are quiet.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import warnings

import torch
import torch.distributed as dist
from ideal import ideal_speedup, measure_costs
from measure import Samples, Stopwatch, describe_ratio, time_alone
from runners import PAIRS, Runner, data_parallel, make_groups, one_process, our_hand_split, our_pipeline, torch_pipeline
from workload import Workload


def build(work: Workload, only: list[str]) -> dict[str, Runner]:
    groups = make_groups()
    runners = {"both alone": one_process(work), "DDP": data_parallel(work)}
    for pair in PAIRS:
        if only and pair.ours not in only:
            continue
        if pair.torch_name is not None:
            runners[f"torch {pair.label}"] = torch_pipeline(work, pair)
        runners[f"ours {pair.label}"] = our_hand_split(work, pair, groups)
        runners[f"replay {pair.label}"] = our_pipeline(work, pair, groups)
    return runners


def check_gradients(runners: dict[str, Runner]) -> dict[str, float]:
    """Largest difference from one process, relative to the block's largest gradient."""
    expected: dict[int, torch.Tensor] = {}
    errors = {}
    for name, runner in runners.items():
        runner.clear()
        runner.step()
        found = {i: torch.cat([p.grad.flatten() for p in b.parameters()]) for i, b in runner.blocks.items()}
        expected = expected or found
        error = torch.tensor(
            max(float((g - expected[i]).abs().max() / expected[i].abs().max()) for i, g in found.items())
        )
        dist.all_reduce(error, dist.ReduceOp.MAX)
        errors[name] = float(error)
    return errors


def measure(runners: dict[str, Runner], seconds: float) -> dict[str, Samples]:
    samples = {name: Samples() for name in ("solo", *runners)}
    watch, end = Stopwatch(), time.time() + seconds
    while True:
        runners["both alone"].clear()
        time_alone(runners["both alone"].step, samples["solo"])
        for name, runner in runners.items():
            runner.clear()
            watch.start()
            runner.step()
            watch.stop(samples[name])
        over = torch.tensor([int(time.time() > end)])
        dist.broadcast(over, 0)
        if over:
            return samples


def report(case: str, runners: dict[str, Runner], samples: dict[str, Samples], errors: dict[str, float]) -> None:
    solo, both = samples["solo"], samples["both alone"]
    rounds = len(solo.wall)
    print(f"case {case}, torch {torch.__version__}, {rounds} rounds, load {os.getloadavg()[0]:.1f}")
    low = case == "tiny"  # too short to tell quiet samples apart
    time_of = (lambda s: s.low()) if low else (lambda s: s.median(s.num_quiet >= 5))
    ceiling = 2 * time_of(solo) / time_of(both)
    print(f"ceiling (two at once over one) {ceiling:.3f}, quiet samples of one process {solo.num_quiet}")
    work_cpu = statistics.median(both.cpu) / 2
    ideal = {}
    if not low:
        costs = measure_costs(Workload.make(case), dist.get_world_size())
        b = costs.backward_full
        print(f"F {costs.forward / b:.3f} B 1 I {costs.backward_input / b:.3f} W {costs.backward_weight / b:.3f}")
        ideal = {pair.label: ideal_speedup(pair, 2, costs) for pair in PAIRS}
    against_what = "ours/torch, replay/ours [95 %]"
    print(f"| runner | speed-up | ideal | of attainable | quiet | {against_what} | CPU | CPU us | grad err |")
    print("|---" * 9 + "|")
    for name, runner in runners.items():
        own = samples[name]
        label = name.partition(" ")[2]
        gain = time_of(solo) / time_of(own) * (2 if name == "both alone" else 1)
        best = ideal.get(label)
        attained = f"{gain / best / (ceiling / 2):.1%}" if best else ""
        other = samples.get(f"torch {label}") if name.startswith("ours") else samples.get(f"ours {label}")
        against = describe_ratio(own, other) if name.startswith(("ours", "replay")) and other else ""
        over = (statistics.median(own.cpu) - work_cpu) / runner.pairs * 1e6 if runner.pairs and low else None
        overhead = "" if over is None else f"{over:.0f}"
        share = statistics.median(own.cpu) / work_cpu / (2 if name == "both alone" else 1)
        bound = f"{best:.3f}" if best else ""
        print(
            f"| {name} | {gain:.3f} | {bound} | {attained} | {own.num_quiet}/{rounds} | {against} | {share:.3f} "
            f"| {overhead} | {errors[name]:.0e} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("big", "tiny"), default="big")
    parser.add_argument("--seconds", type=float, default=150, help="how long to take turns")
    parser.add_argument("--only", default="", help="schedules of ours, separated by commas")
    parser.add_argument("--out", default="", help="file for all samples, as JSON")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work = Workload.make(options.case)
    runners = build(work, [name for name in options.only.split(",") if name])
    errors = check_gradients(runners)
    measure(runners, 2.0)  # warm up
    gc.collect()
    gc.freeze()
    samples = measure(runners, options.seconds)
    if dist.get_rank() == 0:
        report(options.case, runners, samples, errors)
        if options.out:
            with open(options.out, "w") as out:
                json.dump({name: vars(entry) for name, entry in samples.items()}, out)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # frozen objects may outlive the groups they need


if __name__ == "__main__":
    main()
