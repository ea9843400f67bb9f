"""Parameters owned by several ranks, and gradients wider than their parameters."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from d9d_lightning.gradients import GradientSynchronizer
from d9d_lightning.testing import distributed


def pair_groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Ranks 0 and 1 are the stages of replica 0, ranks 2 and 3 those of replica 1: (owners, replicas) of this rank."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    rank = dist.get_rank()
    return groups[rank // 2], groups[2 + rank % 2]


@distributed(ranks=4)
def test_shared_parameters_are_summed_over_owners_and_averaged_over_replicas() -> None:
    """Tied copies on two stages times two replicas stay bit-equal over 5 optimizer steps and equal one device."""
    owners, replicas = pair_groups()
    rank = dist.get_rank()
    stage, replica = rank % 2, rank // 2
    torch.manual_seed(3)
    tied, second = (nn.Parameter(torch.randn(37, 5)) for _ in range(2))
    own = nn.Parameter(torch.randn(11 + stage))
    reference = nn.Parameter(tied.detach().clone())
    # The owners list their parameters in different orders and groups, and have different ones of their own.
    groups = [[own], [second, tied]] if stage == 0 else [[tied, own, second]]
    synchronizer = GradientSynchronizer(groups, 25, 1)
    synchronizer.bind(mesh=replicas, shared={tied: owners, second: owners})
    optimizer = torch.optim.AdamW([tied, second, own], lr=0.1)
    expected = torch.optim.AdamW([reference], lr=0.1)

    def loss(weight: torch.Tensor, step: int, replica: int, stage: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + 10 * replica + stage)
        return (weight * torch.randn(37, 5, generator=generator)).square().sum()

    for step in range(5):
        (loss(tied, step, replica, stage) + own.sum()).backward()
        synchronizer.finish()
        synchronizer.wait()
        (sum(loss(reference, step, r, s) for r in range(2) for s in range(2)) / 2).backward()
        torch.testing.assert_close(tied.grad, reference.grad)
        assert second.grad is None
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
    copies = [torch.empty_like(tied) for _ in range(4)]
    dist.all_gather(copies, tied.detach())
    assert all(torch.equal(copy, copies[0]) for copy in copies)
    torch.testing.assert_close(tied, reference)


@distributed(ranks=2)
def test_shared_parameter_used_by_one_owner_only() -> None:
    """An owner that did not use a shared parameter gets the other owner's gradient, undivided."""
    weight = nn.Parameter(torch.ones(3))
    synchronizer = GradientSynchronizer([[weight]], 25, None)
    synchronizer.bind(mesh=(), shared={weight: dist.group.WORLD})
    if dist.get_rank() == 1:
        (weight * 5).sum().backward()
    synchronizer.finish()
    synchronizer.wait()
    assert (weight.grad == 5).all()


@distributed(ranks=2)
def test_wider_gradients_do_not_lose_small_accumulations() -> None:
    """With ``gradient_dtype=float32``, 300 accumulations of 1 into a bfloat16 parameter give 300, not 256."""
    exact, lossy = (nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2))
    wide = GradientSynchronizer([[exact]], 25, 300, gradient_dtype=torch.float32)
    narrow = GradientSynchronizer([[lossy]], 25, 300)
    for synchronizer in (wide, narrow):
        synchronizer.bind(mesh=dist.group.WORLD)
        synchronizer.zero_grad(set_to_none=True)
    for _ in range(300):
        (exact.sum() + lossy.sum()).backward()
    wide.wait()
    narrow.wait()
    assert exact.grad.dtype == torch.float32
    assert (exact.grad == 300).all()
    assert (lossy.grad == 256).all()


@distributed(ranks=2)
@pytest.mark.parametrize("local", [False, True])
def test_optimizers_get_gradients_of_their_own_type(local: bool) -> None:
    """``lower_gradients`` lets AdamW step bfloat16 parameters; the next step accumulates in float32 again."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    before = weight.grad_dtype
    synchronizer = GradientSynchronizer([[weight]], 25, 2, gradient_dtype=torch.float32)
    synchronizer.bind(mesh=() if local else dist.group.WORLD)
    optimizer = torch.optim.AdamW([weight], lr=0.5)
    for own_zero in (False, True, False):
        for _ in range(2):
            (weight * (1 + 2**-9)).sum().backward()
        synchronizer.wait()
        assert weight.grad.dtype == torch.float32
        synchronizer.lower_gradients()
        assert weight.grad.dtype == torch.bfloat16
        optimizer.step()
        if own_zero:
            synchronizer.zero_grad()
        else:
            optimizer.zero_grad()
    assert (weight < 0.1).all()
    synchronizer.unbind()
    assert weight.grad_dtype == before


@distributed(ranks=2)
def test_scaling_reaches_every_gradient_once() -> None:
    """``scale_gradients`` multiplies reduced and local gradients by a number or a 0-dim tensor of another type."""
    rank = dist.get_rank()
    used, idle = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    half = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    synchronizer = GradientSynchronizer([[used, idle], [half]], 25, None)
    synchronizer.bind(mesh=dist.group.WORLD)
    ((used * 2).sum() * rank + half.sum()).backward()
    synchronizer.finish()
    synchronizer.wait()
    synchronizer.scale_gradients(torch.tensor(0.25, dtype=torch.float64))
    synchronizer.scale_gradients(2)
    assert (used.grad == 0.5).all()
    assert (half.grad == 0.5).all()
    assert idle.grad is None
