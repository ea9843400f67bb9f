"""What users of the original know: DTensors, mixed placements and element types, several accumulations and steps."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from d9d_lightning.gradients import GradientSynchronizer, LocalGradientBucket, SyncGradientBucket
from d9d_lightning.testing import distributed

ALL_DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
]


def make_parameter(mesh, shape, placements, dtype, gradient_dtype):
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape).to(dtype)
    local = full
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            local = local.tensor_split(mesh.size(dim), placement.dim)[mesh.get_local_rank(dim)]
    wrapped = DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )
    parameter = nn.Parameter(wrapped)
    parameter.grad_dtype = gradient_dtype
    return parameter


def accumulate(parameters, value: float) -> None:
    loss = sum((parameter.to_local() * value).sum() for parameter in parameters)
    loss.backward()


@distributed(ranks=2)
@pytest.mark.parametrize("dtypes", ALL_DTYPES)
def test_mixed_placements_over_five_steps(dtypes) -> None:
    """Replicated gradients are averaged and sharded ones stay local, over 2 accumulations and 5 steps."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    rank = dist.get_rank()
    shapes = [(3,), (2, 3, 4, 5), (151, 55), (7, 1)]
    replicated = [make_parameter(mesh, shape, [Replicate()], *dtypes) for shape in shapes]
    sharded = [make_parameter(mesh, shape, [Shard(0)], *dtypes) for shape in shapes]
    hooks_before = [p._post_accumulate_grad_hooks for p in replicated + sharded]
    synchronizer = GradientSynchronizer([[*replicated, *sharded[:2]], sharded[2:]], 0.01, 2)
    synchronizer.bind()
    for _ in range(5):
        assert all(p.grad.dtype == dtypes[1] and not p.grad.to_local().any() for p in replicated)
        assert all(p.grad is None for p in sharded)
        accumulate(replicated + sharded, rank)
        with pytest.raises(ValueError, match="not ready"):
            synchronizer.wait()
        accumulate(replicated + sharded, rank)
        synchronizer.wait()
        for parameter in replicated:
            assert parameter.grad.placements == (Replicate(),)
            assert torch.equal(parameter.grad.to_local(), torch.full(parameter.shape, 1.0, dtype=dtypes[1]))
        for parameter in sharded:
            assert (parameter.grad.to_local() == 2.0 * rank).all()
        synchronizer.zero_grad()
    assert {type(bucket) for bucket in synchronizer.buckets} == {LocalGradientBucket, SyncGradientBucket}
    synchronizer.unbind()
    assert all(p.grad is None and p.grad_dtype == dtypes[1] for p in replicated + sharded)
    assert hooks_before == [None] * 8
    assert all(not p._post_accumulate_grad_hooks for p in replicated + sharded)


@distributed(ranks=4)
def test_two_axes_are_reduced_one_after_the_other() -> None:
    """On a 2-axis mesh each parameter is averaged over exactly its replicated axes; plain ones over the given mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    rank = dist.get_rank()
    both = make_parameter(mesh, (4, 4), [Replicate(), Replicate()], torch.float32, torch.float32)
    outer = make_parameter(mesh, (4, 4), [Replicate(), Shard(0)], torch.float32, torch.float32)
    inner = make_parameter(mesh, (4, 4), [Shard(1), Replicate()], torch.float32, torch.float32)
    only_inner_mesh = make_parameter(mesh["inner"], (4,), [Shard(0)], torch.float32, torch.float32)
    plain = nn.Parameter(torch.ones(3))
    synchronizer = GradientSynchronizer([[both, outer, inner, only_inner_mesh, plain]], 25, 1)
    synchronizer.bind(mesh=mesh)
    accumulate([both, outer, inner, only_inner_mesh], float(rank))
    (plain * rank).sum().backward()
    synchronizer.wait()
    column, row = rank % 2, rank // 2
    assert (both.grad.to_local() == 1.5).all()
    assert (outer.grad.to_local() == 1.0 + column).all()
    assert (inner.grad.to_local() == 2.0 * row + 0.5).all()
    assert (only_inner_mesh.grad.to_local() == 1.0 + column).all()
    assert (plain.grad == 1.5).all()


@distributed(ranks=2)
def test_gradient_left_partial_by_a_dtensor_program() -> None:
    """A gradient that DTensor operations leave as partial sums ends as the whole sum, once."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    weight = make_parameter(mesh, (3, 2), [Replicate()], torch.float32, torch.float32)
    arrived = []
    weight.register_post_accumulate_grad_hook(lambda w: arrived.append(w.grad.placements[0]))
    synchronizer = GradientSynchronizer([[weight]], 25, 1)
    synchronizer.bind()
    synchronizer.zero_grad(set_to_none=True)
    batch = DTensor.from_local(torch.full((2, 3), dist.get_rank() + 1.0), mesh, [Shard(0)])
    (batch @ weight).sum().backward()
    assert arrived[0].is_partial()
    synchronizer.wait()
    assert weight.grad.placements == (Replicate(),)
    assert (weight.grad.to_local() == 6.0).all()


@distributed(ranks=2)
def test_unknown_placement_and_missing_dtype_are_named() -> None:
    """A partial parameter and one without a gradient element type are refused at bind, which leaves nothing behind."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    partial = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False))
    with pytest.raises(ValueError, match=r"embed has placement .*Replicate and Shard only"):
        GradientSynchronizer([[("embed", partial)]], 25, 1).bind()
    untyped = make_parameter(mesh, (2,), [Replicate()], torch.float32, None)
    typed = make_parameter(mesh, (2,), [Replicate()], torch.float32, torch.float32)
    synchronizer = GradientSynchronizer([[("typed", typed)], [("untyped", untyped)]], 25, 1)
    with pytest.raises(ValueError, match="untyped has grad_dtype None"):
        synchronizer.bind()
    assert typed.grad is None
    assert not typed._post_accumulate_grad_hooks
    untyped.grad_dtype = torch.float32
    synchronizer.bind()
    synchronizer.unbind()
