"""Modules built on the meta device: memory and values where they are owned, and the same values at every size."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from d9d_lightning.errors import PartitionError
from d9d_lightning.partition.placeholder import Placeholder
from d9d_lightning.runtime.groups import PipelineGroups
from d9d_lightning.runtime.materialize import materialize
from d9d_lightning.runtime.pipeline import Pipeline
from d9d_lightning.schedule import build_program
from d9d_lightning.testing import run_distributed
from d9d_lightning.values import Microbatch


def build() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(4)], nn.Linear(8, 3))


def train_one_batch(schedule: str) -> tuple[list[float], dict[str, torch.Tensor], int]:
    size, rank = dist.get_world_size(), dist.get_rank()
    net = build()
    made = [dist.new_group(list(range(size))) for _ in range(4)] if size > 1 else []
    groups = PipelineGroups(*made, process_of=tuple(range(size))) if made else None
    program = build_program(schedule, pp_size=size, num_microbatches=2)
    pipeline = Pipeline(net, stage_to_rank=program.stage_to_rank, rank=rank, size=size, groups=groups)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    pieces = [Microbatch(i, 2, (piece, 0)) for i, piece in enumerate(x.tensor_split(2))]
    losses: list[float] = []

    def step(piece: Microbatch) -> torch.Tensor:
        out: torch.Tensor = net(piece.args[0])
        return F.cross_entropy(out, torch.tensor([0, 2]))

    def finish(piece: Microbatch, loss: torch.Tensor) -> torch.Tensor:
        losses.append(float(loss.detach()))
        return loss / 2

    pipeline.place(step, pieces)
    pipeline.release(seed=5)
    pipeline.run(step, pieces, program, finish=finish)
    gradients = {name: p.grad for name, p in pipeline.owned_parameters.items() if p.grad is not None}
    return losses, gradients, sum(isinstance(p, Placeholder) for p in net.parameters())


def test_values_do_not_depend_on_the_number_of_ranks() -> None:
    """A meta-built module starts from the same values, and gets the same gradients, at pipeline size 1 and 2."""
    (losses, expected, none_given_up), *_ = run_distributed(train_one_batch, 1, ("zbv",))
    ranks = run_distributed(train_one_batch, 2, ("zbv",))
    assert none_given_up == 0 and all(given_up > 0 for _, _, given_up in ranks)
    assert losses == ranks[0][0]
    got = {**ranks[0][1], **ranks[1][1]}
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-6, atol=1e-8)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.linear = nn.Linear(3, 3)


def test_a_tensor_that_nobody_fills_is_named() -> None:
    """A meta-built parameter without a reset_parameters() is an error with its name, unless a checkpoint follows."""
    with torch.device("meta"):
        net = Bare()
    with pytest.raises(PartitionError, match="'scale'"):
        materialize(net, {"scale", "linear.weight", "linear.bias"}, torch.device("cpu"))
    with torch.device("meta"):
        net = Bare()
    materialize(net, {"scale", "linear.weight", "linear.bias"}, torch.device("cpu"), given={"scale"})
    assert not any(p.is_meta for p in net.parameters())


def test_parameters_keep_their_objects() -> None:
    """An optimizer made before the module had memory still holds its parameters."""
    with torch.device("meta"):
        net = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    materialize(net, {"weight", "bias"}, torch.device("cpu"))
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in net.parameters()]
    assert not torch.isnan(net.weight).any()
