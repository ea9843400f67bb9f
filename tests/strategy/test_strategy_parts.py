"""The parts of the strategy that need no trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from d9d_lightning.errors import PipelineConfigurationError
from d9d_lightning.strategy import compat
from d9d_lightning.strategy.losses import BatchLoss, StepOutputError, WeightWindow
from d9d_lightning.strategy.mesh import AxisSizes, process_of_rank, rank_of_process, resolve_axes
from d9d_lightning.strategy.messages import Messenger, RemoteError
from d9d_lightning.strategy.optimizers import prune_optimizer, read_layout, to_global_state, to_local_state
from d9d_lightning.strategy.records import MetricReading, combine_records, returned_losses
from d9d_lightning.strategy.stream import receive_tree, send_tree
from d9d_lightning.testing import distributed
from d9d_lightning.values import LogRecord


@pytest.mark.parametrize("name", compat.__all__)
def test_every_private_name_of_lightning_is_there(name):
    """Each name taken from Lightning's private modules exists in the installed version."""
    assert getattr(compat, name) is not None


@pytest.mark.parametrize(
    ("versions", "wanted"),
    [
        (("2.6.3", "2.13.0"), "lightning>=2.6.4,<2.7.0"),
        (("2.7.0", "2.13.0"), "lightning>=2.6.4,<2.7.0"),
        (("2.6.6", "2.10.1"), "torch>=2.11.0,<2.15.0"),
        (("2.6.6", "2.15.0.dev1+cpu"), "torch>=2.11.0,<2.15.0"),
    ],
)
def test_versions_outside_the_range_are_refused_with_a_line_to_type(versions, wanted):
    """An untried version says which ones were tried and how to install one."""
    with pytest.raises(PipelineConfigurationError, match="pip install") as refused:
        compat.check_versions(*versions)
    assert wanted in str(refused.value)
    compat.check_versions("2.6.4", "2.11.0+cpu")


def test_axes_multiply_to_the_world():
    """``"auto"`` takes what the other axes leave, and ranks and coordinates are inverse to each other."""
    assert resolve_axes(8, "auto", 2, 1) == AxisSizes(4, 2, 1)
    sizes = AxisSizes(3, 2, 2)
    assert [sizes.global_rank(sizes.position(rank)) for rank in range(12)] == list(range(12))
    # pipeline is outermost: neighbours in rank are replicas
    assert sizes.position(5).pipeline == 1
    with pytest.raises(PipelineConfigurationError, match=r"devices=6"):
        resolve_axes(4, 3, 2, 1)


@pytest.mark.parametrize("owner", [0, 3])
def test_the_first_process_owns_the_loss(owner):
    """Whatever rank holds the last stage, process 0 of the pipeline plays it, and the map can be undone."""
    assert rank_of_process(0, 4, owner) == owner
    assert [process_of_rank(rank_of_process(p, 4, owner), 4, owner) for p in range(4)] == [0, 1, 2, 3]


def record(value, size, **options):
    return LogRecord("training_step", "key", torch.tensor(value), {"reduce_fx": torch.mean, **options}, size)


@pytest.mark.parametrize(
    ("records", "value", "batch_size"),
    [
        ([record(1.0, 3), record(4.0, 1)], 1.75, None),
        ([record(1.0, 3, reduce_fx="sum"), record(4.0, 1, reduce_fx="sum")], 5.0, None),
        ([record(1.0, 3, reduce_fx=max), record(4.0, 1, reduce_fx=max)], 4.0, None),
        ([record(1.0, 3, reduce_fx=torch.min), record(4.0, 1, reduce_fx=torch.min)], 1.0, None),
        ([record(1.0, 3, batch_size=30), record(4.0, 1, batch_size=60)], 3.0, 90),
        ([record(1.0, 3, batch_size=1), record(4.0, 1, batch_size=1)], 1.75, 1),
        ([record(1, 3), record(4, 1)], 1.75, None),
        ([record(2.5, 4)], 2.5, None),
    ],
)
def test_records_of_microbatches_become_one_of_the_batch(records, value, batch_size):
    """Means are weighted by size, sums add, extremes stay, and batch sizes add up unless they are a constant 1."""
    (combined,) = combine_records(records)
    assert float(combined.value) == pytest.approx(value)
    assert combined.options.get("batch_size") == batch_size


def test_a_logged_loss_is_a_mean_of_samples_under_any_reduction():
    """A key that holds the returned losses is averaged over the batch even where batches are reduced by max."""
    records = [record(1.0, 3, reduce_fx=torch.max), record(4.0, 1, reduce_fx=torch.max)]
    (combined,) = combine_records(records, (torch.tensor(1.0), torch.tensor(4.0)))
    assert float(combined.value) == 1.75
    assert returned_losses([torch.tensor(1.0), {"loss": torch.tensor(4.0)}]) == (1.0, 4.0)
    assert returned_losses([torch.tensor(1.0), None]) == returned_losses([torch.ones(2), torch.ones(2)]) == ()
    counts = [record(1.0, 3, reduce_fx="sum"), record(4.0, 1, reduce_fx="sum")]
    assert float(combine_records(counts, (torch.tensor(1.0), torch.tensor(4.0)))[0].value) == 5.0
    sums = [record(1.5, 3, reduce_fx="sum"), record(4.0, 1, reduce_fx="sum")]
    assert float(combine_records(sums, (torch.tensor(1.5), torch.tensor(4.0)))[0].value) == 2.125


def test_step_values_of_metrics_are_weighted_means():
    """A torchmetrics object keeps its state; what its ``forward`` returned is averaged over samples."""
    readings = [
        replace(record(0.0, size), value=MetricReading("acc", torch.tensor(v))) for v, size in ((1.0, 1), (0.0, 3))
    ]
    (combined,) = combine_records(readings)
    assert float(combined.value.forward_value) == 0.25


def test_losses_count_by_samples_or_by_weight():
    """Roots add up to the loss of the batch, divided by the accumulation; weights replace sample counts."""
    plain = BatchLoss(4, 2, 1.0)
    roots = [
        plain.root(torch.tensor(1.0, requires_grad=True), 3),
        plain.root({"loss": torch.tensor(5.0, requires_grad=True)}, 1),
    ]
    assert float(sum(roots)) == pytest.approx(2.0 / 2)
    assert float(plain.mean()) == pytest.approx(2.0)
    weighted = BatchLoss(4, 2, 1.0)
    for loss, weight, size in ((1.0, 10, 3), (4.0, torch.tensor(5), 1)):
        weighted.root({"loss": torch.tensor(loss, requires_grad=True), "loss_weight": weight}, size)
    assert (float(weighted.mean()), weighted.weight) == (2.0, 15.0)
    with pytest.raises(StepOutputError, match="some microbatches only"):
        weighted.root(torch.tensor(1.0, requires_grad=True), 1)


def test_a_weight_window_pools_and_rescales_by_powers_of_two():
    """The scale undoes the reference and divides by the pooled weight; the next reference is exact."""
    window = WeightWindow()
    window.add(10.0)
    window.add(30.0)
    assert window.used
    assert window.close(80.0) == 1 / 80
    assert window.reference == 64.0
    window.add(None)
    assert not window.used


def grouped(module):
    named = dict(module.named_parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for n, p in named.items() if "bias" in n], "weight_decay": 0.0},
            {"params": [p for n, p in named.items() if "weight" in n], "lr": 0.5},
        ]
    )


def test_a_pruned_optimizer_keeps_groups_and_global_ids():
    """Parts of two ranks, saved under global ids, join to the state that the whole optimizer has."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    whole = grouped(module)
    module(torch.ones(4, 2)).sum().backward()
    whole.step()
    expected = whole.state_dict()
    joined = {}
    for kept in ("0.", "1."):
        optimizer = grouped(module)
        layout = read_layout(optimizer, module)
        owned = {name: p for name, p in module.named_parameters() if name.startswith(kept)}
        prune_optimizer(optimizer, layout, owned)
        assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]
        optimizer.load_state_dict(to_local_state(expected, layout, owned))
        again = to_global_state(optimizer.state_dict(), layout, owned)
        joined.update(again["state"])
        assert [group["params"] for group in again["param_groups"]] == [[0, 1], [2, 3]]
    assert sorted(joined) == [0, 1, 2, 3]
    for identifier, state in expected["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(joined[identifier][key], value, rtol=0, atol=0)


def test_a_group_without_parameters_of_this_rank_steps_as_if_it_were_not_there():
    """An empty group keeps its place, so that schedulers and monitors see all of them."""
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(
        [{"params": list(module[0].parameters())}, {"params": list(module[1].parameters())}], 0.1
    )
    prune_optimizer(optimizer, read_layout(optimizer, module), dict(module[1].named_parameters(prefix="1")))
    module(torch.ones(1, 2)).sum().backward()
    before = module[0].weight.clone()
    optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 2]
    assert torch.equal(before, module[0].weight)


def fail():
    raise ValueError("no luck")


@distributed(ranks=2)
def test_messages_arrive_whole_whatever_their_size():
    """Numbers, tensors and megabytes reach the other rank; a failure of the owner raises on both."""
    rank = dist.get_rank()
    messenger = Messenger(dist.group.WORLD, 0, rank == 0, torch.device("cpu"))
    for value in (1, {"a": torch.tensor(1.5)}, [torch.arange(9).reshape(3, 3).t()], "x" * 300_000):
        received = messenger.share(lambda value=value: value if rank == 0 else None)
        assert str(received) == str(value)
    with pytest.raises(ValueError if rank == 0 else RemoteError, match="no luck"):
        messenger.share(fail)


@distributed(ranks=2)
def test_a_streamed_tree_keeps_types_shapes_and_shared_memory():
    """Every element type arrives bit for bit, and two names of one tensor stay one."""
    shared = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    tree = {
        "tied": [shared, shared],
        "half": torch.ones(2, 3, dtype=torch.bfloat16).t(),
        "flag": torch.tensor([True, False]),
        "none": None,
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "complex": torch.tensor([1 + 2j]),
        "large": torch.arange(5_000_000, dtype=torch.float32),
    }
    if dist.get_rank():
        send_tree(tree, 0, dist.group.WORLD)
        return
    received = receive_tree(1, dist.group.WORLD, Path.cwd())
    assert received["tied"][0] is received["tied"][1]
    assert received["none"] is None
    for key in ("half", "flag", "empty", "scalar", "complex", "large"):
        torch.testing.assert_close(received[key], tree[key].contiguous(), rtol=0, atol=0)
    assert not list(Path.cwd().glob(".d9d-spool-*"))


KILLED = """
import os, signal, sys, torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from d9d_lightning.strategy import files
save = torch.save
def save_half(checkpoint, handle):
    save(checkpoint, handle)
    handle.flush()
    os.truncate(handle.name, os.path.getsize(handle.name) // 2)
    os.kill(os.getpid(), signal.SIGKILL)
torch.save = save_half
files.write_checkpoint(TorchCheckpointIO(), {"step": 2, "x": torch.zeros(100000)}, sys.argv[1])
"""


def test_a_kill_while_saving_leaves_the_previous_checkpoint_readable(tmp_path):
    """A process that dies half-way through a file leaves the old file under the name."""
    target = tmp_path / "last.ckpt"
    torch.save({"step": 1}, target)
    done = subprocess.run([sys.executable, "-c", KILLED, str(target)], check=False, env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    assert torch.load(target, weights_only=True) == {"step": 1}
