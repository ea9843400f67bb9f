"""Global norms and clipping: equal to torch on one device, bit-equal on all ranks, no host in the way."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_lightning.gradients import (
    clip_gradients_by_norm,
    clip_gradients_by_value,
    global_gradient_norm,
    global_parameter_norms,
)
from d9d_lightning.testing import distributed


class RefuseHostReads(TorchDispatchMode):
    """Raises where the host would have to wait for a device: on CUDA every one of these blocks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            raise AssertionError(f"{func} reads a value on the host")
        return func(*args, **(kwargs or {}))


def make_parameters(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    parameters = []
    for index in range(count):
        shape = (3 + index, 5)
        parameters.append(nn.Parameter(torch.zeros(shape, dtype=dtype)))
        parameters[-1].grad = torch.randn(shape, generator=generator).to(dtype)
    return parameters


def bits(value: torch.Tensor) -> list[bytes]:
    """The bytes of a 0-dim tensor on every rank."""
    gathered: list[bytes] = [b""] * dist.get_world_size()
    dist.all_gather_object(gathered, value.numpy().tobytes())
    return gathered


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 5.0, 1e4])
def test_one_rank_equals_torch(norm_type: float, max_norm: float) -> None:
    """Without groups, norm and clipped gradients are those of ``torch.nn.utils.clip_grad_norm_``."""
    mine, theirs = make_parameters(4), make_parameters(4)
    norm = clip_gradients_by_norm(mine, max_norm, norm_type=norm_type)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm, norm_type=norm_type)
    torch.testing.assert_close(norm.float(), expected)
    for left, right in zip(mine, theirs, strict=True):
        torch.testing.assert_close(left.grad, right.grad)


def test_missing_gradients_repeats_and_zero_limits() -> None:
    """A parameter without gradient counts as zero, one given twice counts once, a limit of 0 zeroes."""
    parameters = make_parameters(3)
    expected = torch.stack([p.grad.norm() for p in parameters]).norm().double()
    bare = nn.Parameter(torch.ones(2))
    torch.testing.assert_close(global_gradient_norm([*parameters, bare, parameters[0]]), expected, rtol=1e-6, atol=0)
    assert global_gradient_norm([]) == 0
    assert global_gradient_norm(iter([bare])) == 0
    clip_gradients_by_norm(parameters, 0.0)
    assert all(not p.grad.any() for p in parameters)


def test_low_precision_gradients_are_summed_in_float32() -> None:
    """A bfloat16 gradient of 10000 ones has norm 100, which bfloat16 arithmetic misses."""
    parameter = nn.Parameter(torch.zeros(10_001, dtype=torch.bfloat16))
    parameter.grad = torch.ones(10_001, dtype=torch.bfloat16)
    other = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    other.grad = torch.full((1,), 1e-3, dtype=torch.float64)
    norm = global_gradient_norm([parameter, other])
    torch.testing.assert_close(norm, torch.tensor(math.sqrt(10_001 + 1e-6), dtype=torch.float64), rtol=1e-7, atol=0)


@pytest.mark.parametrize("bad", [-1.0, math.nan])
def test_nonsense_limits_are_refused(bad: float) -> None:
    """Negative and NaN limits, and norms of a non-positive order, are errors with a remedy."""
    with pytest.raises(ValueError, match="do not clip"):
        clip_gradients_by_norm([], bad)
    with pytest.raises(ValueError, match="do not clip"):
        clip_gradients_by_value([], bad)
    with pytest.raises(ValueError, match=r"math\.inf"):
        global_gradient_norm([], norm_type=bad)


def test_value_clipping_reaches_every_type() -> None:
    """Every gradient ends inside the limit, whatever its element type; NaN stays NaN."""
    parameters = make_parameters(2) + make_parameters(2, dtype=torch.bfloat16)
    parameters[0].grad[0, 0] = math.nan
    clip_gradients_by_value(parameters, 0.25)
    assert all(p.grad.nan_to_num().abs().max() == 0.25 for p in parameters)
    assert parameters[0].grad[0, 0].isnan()


@distributed(ranks=2)
@pytest.mark.parametrize("norm_type", [2.0, 3.0, math.inf])
def test_ranks_with_different_parameters_agree_to_the_last_bit(norm_type: float) -> None:
    """Over a group of stages the norm is that of one device, its bits and the clipped result agree on all ranks."""
    rank = dist.get_rank()
    stages = [make_parameters(3, seed=1), make_parameters(5, seed=2)]
    mine, everything = stages[rank], make_parameters(3, seed=1) + make_parameters(5, seed=2)
    groups = [dist.group.WORLD]
    expected = nn.utils.clip_grad_norm_(everything, 0.1, norm_type=norm_type)
    with RefuseHostReads():
        norm = clip_gradients_by_norm(mine, 0.1, groups=groups, norm_type=norm_type)
    torch.testing.assert_close(norm.float(), expected)
    assert len(set(bits(norm))) == 1
    for left, right in zip(mine, everything[:3] if rank == 0 else everything[3:], strict=True):
        torch.testing.assert_close(left.grad, right.grad)


@distributed(ranks=2)
def test_rank_without_parameters_takes_part() -> None:
    """A rank that owns nothing sees the same norm."""
    mine = make_parameters(2) if dist.get_rank() == 1 else []
    norm = global_gradient_norm(mine, groups=[dist.group.WORLD], device=torch.device("cpu"))
    torch.testing.assert_close(norm, global_gradient_norm(make_parameters(2)))


@distributed(ranks=2)
@pytest.mark.parametrize("shares", [(1.0, 0.0), (0.0, 1.0), (0.5, 0.5)])
def test_shared_parameter_counts_once(shares: tuple[float, float]) -> None:
    """A parameter that both ranks own enters once, by an owner flag or by fractions."""
    shared = make_parameters(1, seed=9)[0]
    own = make_parameters(2, seed=dist.get_rank())
    norm = global_gradient_norm([shared, *own], groups=[dist.group.WORLD], weights={shared: shares[dist.get_rank()]})
    everything = make_parameters(1, seed=9) + make_parameters(2, seed=0) + make_parameters(2, seed=1)
    torch.testing.assert_close(norm, global_gradient_norm(everything))


@distributed(ranks=2)
def test_nonfinite_norm_is_the_same_everywhere() -> None:
    """NaN on one rank makes the norm and every clipped gradient NaN on all ranks."""
    mine = make_parameters(2)
    if dist.get_rank() == 1:
        mine[0].grad[0, 0] = math.nan
    norm = clip_gradients_by_norm(mine, 1.0, groups=[dist.group.WORLD])
    assert norm.isnan()
    assert all(p.grad.isnan().all() for p in mine)


@distributed(ranks=4)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_shards_count_in_full_and_replicas_once(norm_type: float) -> None:
    """Sharded gradients are summed over their shard axes, replicated ones are not, then both over the stages."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    stage, shard = mesh.get_coordinate()
    inner = mesh["shard"]
    full = make_parameters(3, seed=stage)
    mine = []
    for parameter, placement in zip(full, (Shard(0), Shard(1), Replicate()), strict=True):
        local = parameter.grad
        if isinstance(placement, Shard):
            local = local.tensor_split(2, placement.dim)[shard]
        wrap = {"run_check": False, "shape": parameter.shape, "stride": parameter.stride()}
        mine.append(nn.Parameter(DTensor.from_local(torch.zeros_like(local).contiguous(), inner, [placement], **wrap)))
        mine[-1].grad = DTensor.from_local(local.contiguous(), inner, [placement], **wrap)
    # A stage whose sharded gradient is missing on every rank must not make the others wait.
    if stage == 1:
        mine[1].grad = full[1].grad = None
    everything = [p for s in range(2) for i, p in enumerate(make_parameters(3, seed=s)) if (s, i) != (1, 1)]
    expected = global_gradient_norm(everything, norm_type=norm_type)
    norm = clip_gradients_by_norm(mine, 0.5, groups=[mesh.get_group("stage")], norm_type=norm_type)
    torch.testing.assert_close(norm, expected)
    assert len(set(bits(norm))) == 1
    clipped = global_gradient_norm(mine, groups=[mesh.get_group("stage")], norm_type=norm_type)
    assert clipped.item() == pytest.approx(0.5, rel=1e-5)
    names = global_parameter_norms([(f"{stage}.{i}", p) for i, p in enumerate(mine)], groups=[mesh.get_group("stage")])
    assert sorted(names) == ["0.0", "0.1", "0.2", "1.0", "1.2"]


@distributed(ranks=2)
def test_parameter_norms_of_all_ranks() -> None:
    """Every rank gets the norm of every parameter by name; shared names appear once, missing gradients not at all."""
    rank = dist.get_rank()
    own = make_parameters(2, seed=rank)
    own[1].grad = None if rank else own[1].grad
    tied = make_parameters(1, seed=5)[0]
    named = [(f"stage{rank}.{index}", parameter) for index, parameter in enumerate(own)] + [("tied", tied)]
    norms = global_parameter_norms(named, groups=[dist.group.WORLD])
    assert list(norms) == ["stage0.0", "stage0.1", "stage1.0", "tied"]
    assert norms["tied"] == pytest.approx(tied.grad.norm().item())
    assert norms["stage1.0"] == pytest.approx(make_parameters(1, seed=1)[0].grad.norm().item())
