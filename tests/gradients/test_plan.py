"""Which parameters share a bucket, and what is refused."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from d9d_lightning.errors import GradientSyncError
from d9d_lightning.gradients import GradientSynchronizer, LocalGradientBucket
from d9d_lightning.gradients.plan import fill_buckets, find_reduce_axes, read_group
from d9d_lightning.gradients.tensors import dense_stride, is_sharded


def test_buckets_fill_from_the_last_entry_with_a_small_first_one() -> None:
    """Entries are taken from the end; the first bucket closes once it is large enough to start with."""
    assert fill_buckets("aaaaaa", [4, 4, 4, 4, 4, 4], 8, 4) == [(5,), (4, 3), (2, 1), (0,)]
    assert fill_buckets("aaaaa", [4, 4, 6, 1, 1], 8, 4) == [(4, 3, 2), (1, 0)]
    assert fill_buckets("aaaaa", [4, 4, 7, 1, 1], 8, 4) == [(4, 3), (2,), (1, 0)]


def test_exact_fit_stays_together_and_large_entries_stand_alone() -> None:
    """A bucket may reach its limit exactly, and an entry above the limit gets a bucket of its own."""
    assert fill_buckets("aaaa", [2, 6, 9, 2], 8, 8) == [(3,), (2,), (1, 0)]


def test_keys_never_mix_and_buckets_are_ordered_by_completion() -> None:
    """Entries of different keys never share a bucket; a bucket comes when its earliest entry does."""
    assert fill_buckets("abab", [1, 1, 1, 1], 8, 8) == [(3, 1), (2, 0)]
    assert fill_buckets("abba", [1, 1, 1, 1], 8, 8) == [(2, 1), (3, 0)]
    assert fill_buckets("", [], 8, 8) == []


def test_plain_parameter_without_a_mesh_is_named() -> None:
    """A plain parameter is never left unreduced in silence."""
    synchronizer = GradientSynchronizer([[("head.weight", nn.Parameter(torch.ones(2)))]], 1, 1)
    with pytest.raises(TypeError, match=r"head\.weight is a plain Parameter.*bind\(mesh=\.\.\.\)"):
        synchronizer.bind()


def test_empty_mesh_means_no_replicas() -> None:
    """``bind(mesh=())`` keeps gradients local, and wait follows the same contract as with replicas."""
    weight = nn.Parameter(torch.ones(2))
    synchronizer = GradientSynchronizer([[("w", weight)]], 1, 2)
    synchronizer.bind(mesh=())
    assert [type(bucket) for bucket in synchronizer.buckets] == [LocalGradientBucket]
    (weight * 3).sum().backward()
    with pytest.raises(GradientSyncError, match=r"not ready: w \(1 of 2"):
        synchronizer.wait()
    (weight * 3).sum().backward()
    synchronizer.wait()
    assert torch.equal(weight.grad, torch.full((2,), 6.0))
    synchronizer.zero_grad()
    assert weight.grad is None
    synchronizer.unbind()


def test_contract_is_the_same_without_replicas() -> None:
    """One accumulation too many is an error at one replica too, so that it shows before there are two."""
    weight, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    synchronizer = GradientSynchronizer([[("w", weight), frozen]], 1, 1)
    synchronizer.bind(mesh=())
    weight.sum().backward()
    with pytest.raises(GradientSyncError, match=r"w \(2 of 1"):
        weight.sum().backward()
    synchronizer.abandon()
    weight.sum().backward()
    frozen.grad = torch.ones(2)
    synchronizer.wait()
    synchronizer.zero_grad()
    assert weight.grad is None
    assert frozen.grad is None


def test_lifecycle_errors_say_what_to_do() -> None:
    """Every method needs a bound synchronizer, and binding twice is refused."""
    synchronizer = GradientSynchronizer([[nn.Parameter(torch.ones(2))]], 1, 1)
    for method in (synchronizer.wait, synchronizer.finish, synchronizer.zero_grad, synchronizer.unbind):
        with pytest.raises(ValueError, match=r"bind\(mesh=\.\.\.\) first"):
            method()
    synchronizer.bind(mesh=())
    with pytest.raises(ValueError, match="twice"):
        synchronizer.bind(mesh=())
    synchronizer.unbind()
    synchronizer.bind(mesh=())
    synchronizer.unbind()


@pytest.mark.parametrize("count", [-1, 1.5, True])
def test_nonsense_counts_are_refused(count: object) -> None:
    """A required count is a whole number from 0, or None."""
    with pytest.raises(ValueError, match="whole number"):
        GradientSynchronizer([], 1, count)  # type: ignore[arg-type]


def test_groups_may_come_from_an_optimizer() -> None:
    """Optimizer group dictionaries, pairs and bare parameters are read, a bare tensor is refused."""
    weight = nn.Parameter(torch.ones(2, 3))
    assert read_group({"params": [weight], "lr": 1}, 4) == [("parameter 0 of group 4 (2, 3)", weight)]
    assert read_group({"params": [weight], "param_names": ["w"]}, 0) == [("w", weight)]
    assert read_group(iter([("v", weight)]), 0) == [("v", weight)]
    with pytest.raises(TypeError, match="list of groups"):
        read_group(weight, 0)
    with pytest.raises(TypeError, match="no parameter"):
        read_group(["w"], 0)


def test_axes_of_a_plain_parameter_drop_single_ranks() -> None:
    """Without axes of several ranks there is nothing to reduce over."""
    assert find_reduce_axes("w", torch.ones(1), ()) == ()


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        (torch.empty(2, 3), (3, 1)),
        (torch.empty(2, 3).t(), (1, 3)),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (torch.empty(4, 6)[:, ::2], (3, 1)),
        (torch.empty(3, 1).expand(3, 4), (4, 1)),
        (torch.empty(()), ()),
        (torch.empty(0, 3), (3, 1)),
    ],
)
def test_gradient_strides_follow_dense_parameters(tensor: torch.Tensor, stride: tuple[int, ...]) -> None:
    """A gradient is laid out like its parameter where that covers memory without gaps, else contiguously."""
    assert dense_stride(tensor) == stride


def test_strided_shards_are_shards() -> None:
    """The placement that torch gives to parameters sharded twice is local like any shard."""
    assert is_sharded(_StridedShard(0, split_factor=2))
    assert is_sharded(Shard(1))
    assert not is_sharded(Replicate())
    assert not is_sharded(Partial())
