"""Whatever the user does to gradients, two replicas end with those of one device on the same global batch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from d9d_lightning.gradients import GradientSynchronizer
from d9d_lightning.testing import distributed
from tests.gradients.two_replicas import (
    STEPS,
    assert_same_gradients,
    assert_same_parameters,
    batches,
    make_net,
    reference_backward,
    start,
)


def zero_by_optimizer_to_none(synchronizer, optimizer, net) -> None:
    optimizer.zero_grad()


def zero_by_optimizer_in_place(synchronizer, optimizer, net) -> None:
    optimizer.zero_grad(set_to_none=False)


def zero_by_assignment(synchronizer, optimizer, net) -> None:
    for parameter in net.parameters():
        parameter.grad = None


def zero_by_synchronizer(synchronizer, optimizer, net) -> None:
    synchronizer.zero_grad()


def zero_by_synchronizer_to_none(synchronizer, optimizer, net) -> None:
    synchronizer.zero_grad(set_to_none=True)


def zero_by_new_tensors(synchronizer, optimizer, net) -> None:
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad = torch.zeros_like(parameter)


def zero_by_data(synchronizer, optimizer, net) -> None:
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad.data = torch.zeros_like(parameter)


def zero_not_at_all(synchronizer, optimizer, net) -> None:
    pass


ZEROINGS = [
    zero_by_optimizer_to_none,
    zero_by_optimizer_in_place,
    zero_by_assignment,
    zero_by_synchronizer,
    zero_by_synchronizer_to_none,
    zero_by_new_tensors,
    zero_by_data,
    zero_not_at_all,
]


@distributed(ranks=2)
def test_every_way_to_zero_gradients() -> None:
    """However gradients are dropped, replaced or kept between steps, AdamW ends where it ends on one device."""
    for zero in ZEROINGS:
        net, reference = make_net(), make_net()
        synchronizer = start(net, size=0.0001)
        optimizer, expected = (torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5) for m in (net, reference))
        for step in range(STEPS):
            net(batches(step)[dist.get_rank()]).backward()
            synchronizer.finish()
            synchronizer.wait()
            reference_backward(reference, step)
            assert_same_gradients(net, reference)
            optimizer.step()
            expected.step()
            zero(synchronizer, optimizer, net)
            if zero is not zero_not_at_all:
                expected.zero_grad(set_to_none=zero is not zero_by_optimizer_in_place)
            # Gradients that stay as zeros are decayed by AdamW, on one device too.
            if zero in (zero_by_optimizer_in_place, zero_by_new_tensors, zero_by_data):
                expected.zero_grad(set_to_none=False)
        assert_same_parameters(net, reference)
        synchronizer.unbind()


@distributed(ranks=2)
def test_gradient_dropped_between_two_accumulations() -> None:
    """``p.grad = None`` between accumulations drops the first one, as on one device."""
    net, reference = make_net(), make_net()
    synchronizer = start(net, 2)
    for step in range(2):
        net(batches(step)[dist.get_rank()]).backward()
        reference_backward(reference, step)
        if step == 0:
            net.first.weight.grad = reference.first.weight.grad = None
    synchronizer.finish()
    synchronizer.wait()
    assert_same_gradients(net, reference)


@distributed(ranks=2)
def test_gradients_changed_by_callbacks() -> None:
    """Gradients clipped in place, replaced or repointed, before or after the reduction, leave the next step right."""
    net, reference = make_net(), make_net()
    synchronizer = start(net, None, size=25)
    for step in range(STEPS):
        net(batches(step)[dist.get_rank()]).backward()
        net.last.bias.grad = net.last.bias.grad * 2
        net.last.weight.grad.data = net.last.weight.grad.data * 3
        synchronizer.finish()
        synchronizer.wait()
        reference_backward(reference, step)
        reference.last.bias.grad *= 2
        reference.last.weight.grad *= 3
        assert_same_gradients(net, reference)
        for module in (net, reference):
            nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
            module.gate.weight.grad = module.gate.weight.grad + 1
        assert_same_gradients(net, reference)
        for module in (net, reference):
            module.zero_grad()


@distributed(ranks=2)
def test_in_place_write_into_attached_zeros_counts() -> None:
    """A gradient written by hand into the zeros of ``zero_grad`` is reduced, though no accumulation was seen."""
    net = make_net()
    synchronizer = start(net, None)
    synchronizer.zero_grad()
    net.idle.weight.grad.add_(1.0 + dist.get_rank())
    synchronizer.finish()
    synchronizer.wait()
    assert (net.idle.weight.grad == 1.5).all()
    assert net.idle.bias.grad is None


@distributed(ranks=2)
def test_unused_on_every_replica_ends_as_none() -> None:
    """A parameter that no replica used has no gradient, so AdamW does not decay it, as on one device."""
    net = make_net()
    synchronizer = start(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    before = net.idle.weight.detach().clone()
    for step in range(STEPS):
        net(batches(step)[dist.get_rank()]).backward()
        synchronizer.finish()
        synchronizer.wait()
        assert net.idle.weight.grad is None
        assert net.first.weight.grad is not None
        optimizer.step()
        synchronizer.zero_grad()
    assert torch.equal(net.idle.weight, before)


@distributed(ranks=2)
@pytest.mark.parametrize("size", [0.0, 25.0])
def test_used_on_one_replica_only(size: float) -> None:
    """A parameter used on one replica is averaged with zeros on both, whichever replica it was."""
    net, reference = make_net(), make_net()
    synchronizer = start(net, size=size)
    for step, gates in enumerate([(True, False), (False, True), (False, False), (True, True)]):
        net(batches(step)[dist.get_rank()], gates[dist.get_rank()]).backward()
        synchronizer.finish()
        synchronizer.wait()
        reference_backward(reference, step, gates)
        assert_same_gradients(net, reference)
        net.zero_grad()
        reference.zero_grad()


@distributed(ranks=2)
def test_parameter_in_two_groups_is_reduced_once() -> None:
    """A parameter listed twice has one place in one bucket and the right average."""
    net, reference = make_net(), make_net()
    named = list(net.named_parameters())
    synchronizer = GradientSynchronizer([named, named[:3], [named[0]]], 25, 1)
    synchronizer.bind(mesh=dist.group.WORLD)
    assert sum(len(bucket.slots) for bucket in synchronizer.buckets) == len(named)
    net(batches(0)[dist.get_rank()]).backward()
    synchronizer.finish()
    synchronizer.wait()
    reference_backward(reference, 0)
    assert_same_gradients(net, reference)


@distributed(ranks=2)
def test_frozen_then_unfrozen_then_frozen_again() -> None:
    """Frozen parameters take no part; once unfrozen they are averaged, with or without zeroing in between."""
    for zero_by_hand in (False, True):
        net, reference = make_net(), make_net()
        for module in (net, reference):
            module.gate.requires_grad_(False)
        synchronizer = start(net, 1)
        for step, frozen in enumerate([True, True, False, False, True, False]):
            for module in (net, reference):
                module.gate.requires_grad_(not frozen)
                module.zero_grad()
            if zero_by_hand:
                synchronizer.zero_grad(set_to_none=True)
            net(batches(step)[dist.get_rank()]).backward()
            synchronizer.finish()
            synchronizer.wait()
            reference_backward(reference, step)
            assert_same_gradients(net, reference)
            assert (net.gate.weight.grad is None) == frozen


@distributed(ranks=2)
def test_thawed_after_the_step_before_has_ended() -> None:
    """What was frozen when the last step ended, and trains in this one, is waited for like any other parameter."""
    net, reference = make_net(), make_net()
    synchronizer = start(net, 2, size=25)
    for step, frozen in enumerate([True, True, False, False]):
        for module in (net, reference):
            module.zero_grad()
            module.gate.requires_grad_(not frozen)
            module.last.requires_grad_(not frozen)
        for part in range(2):
            net(batches(2 * step + part)[dist.get_rank()]).backward()
            reference_backward(reference, 2 * step + part)
        synchronizer.finish()
        synchronizer.wait()
        assert_same_gradients(net, reference)


@distributed(ranks=2)
def test_hook_that_comes_after_ours() -> None:
    """A hook registered after bind may still change the gradient: it is not on its way before that."""
    net, reference = make_net(), make_net()
    synchronizer = start(net, 1)
    seen = []

    def halve(parameter: torch.Tensor) -> None:
        seen.extend(bucket.launched for bucket in synchronizer.buckets if bucket.slots[0].parameter is parameter)
        parameter.grad.mul_(0.5)

    for step in range(STEPS):
        for module in (net, reference):
            module.zero_grad()
        if step == 1:
            net.last.weight.register_post_accumulate_grad_hook(halve)
        net(batches(step)[dist.get_rank()]).backward()
        synchronizer.finish()
        synchronizer.wait()
        reference_backward(reference, step)
        if step >= 1:
            reference.last.weight.grad.mul_(0.5)
        assert_same_gradients(net, reference)
    assert seen == [False] * (STEPS - 1)


@distributed(ranks=2)
def test_gradient_given_by_hand_to_a_frozen_parameter() -> None:
    """A parameter frozen after bind is still averaged, and zeroed, if somebody gives it a gradient during the step."""
    net = make_net()
    synchronizer = start(net, 1)
    net.requires_grad_(False)
    synchronizer.zero_grad(set_to_none=True)
    synchronizer.set_required_accumulations(1)
    net.first.bias.grad = torch.full_like(net.first.bias, float(dist.get_rank()))
    synchronizer.wait()
    assert (net.first.bias.grad == 0.5).all()
    assert net.last.bias.grad is None
    synchronizer.zero_grad(set_to_none=True)
    assert net.first.bias.grad is None


@distributed(ranks=2)
def test_everything_frozen_costs_nothing_and_waits_for_nothing() -> None:
    """Without trainable parameters there is no bucket and wait returns."""
    net = make_net().requires_grad_(False)
    synchronizer = start(net)
    assert synchronizer.buckets == ()
    synchronizer.wait()


@distributed(ranks=2)
def test_gradients_from_before_bind_take_part() -> None:
    """A gradient that exists at bind is kept, added to and averaged."""
    net, reference = make_net(), make_net()
    net(batches(0)[dist.get_rank()]).backward()
    reference_backward(reference, 0)
    synchronizer = start(net, 1)
    net(batches(1)[dist.get_rank()]).backward()
    reference_backward(reference, 1)
    synchronizer.finish()
    synchronizer.wait()
    assert_same_gradients(net, reference)


@distributed(ranks=2)
def test_sparse_gradients_are_averaged_as_dense_ones() -> None:
    """A sparse gradient is averaged too, whether it arrives first or is added to zeros."""
    embedding = nn.Embedding(4, 2, sparse=True)
    synchronizer = start(embedding)
    for _ in range(2):
        embedding(torch.tensor([dist.get_rank(), 3])).sum().backward()
        synchronizer.wait()
        assert torch.equal(embedding.weight.grad, torch.tensor([[0.5], [0.5], [0.0], [1.0]]).expand(4, 2))
        embedding.zero_grad()


@distributed(ranks=2)
def test_gradients_keep_the_layout_of_their_parameters() -> None:
    """A channels-last weight gets a channels-last gradient, complex and empty parameters work."""
    convolution = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    wave = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    empty = nn.Parameter(torch.ones(0, 3))
    synchronizer = GradientSynchronizer([[*convolution.parameters(), wave, empty]], 25, 1)
    synchronizer.bind(mesh=dist.group.WORLD)
    rank = dist.get_rank()
    loss = convolution(torch.ones(1, 3, 4, 4)).sum() * rank + (wave * 1j * rank).imag.sum() + empty.sum()
    loss.backward()
    synchronizer.wait()
    assert convolution.weight.grad.stride() == convolution.weight.stride()
    assert (convolution.weight.grad == 4.5).all()
    assert (wave.grad.abs() == 0.5).all()
    assert empty.grad.shape == (0, 3)
