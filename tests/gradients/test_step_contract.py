"""When gradients are reduced: counts, marks, the end of a step, one order on all replicas, and what is refused."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from d9d_lightning.errors import GradientSyncError
from d9d_lightning.gradients import GradientSynchronizer
from d9d_lightning.testing import distributed
from tests.gradients.two_replicas import (
    STEPS,
    assert_same_gradients,
    batches,
    make_net,
    reference_backward,
    start,
)


@distributed(ranks=2)
def test_used_in_some_accumulations_only() -> None:
    """A parameter with fewer accumulations than required is reduced when the caller says that the step is over."""
    net, reference = make_net(), make_net()
    synchronizer = start(net, 2)
    for step, gate in enumerate([True, False]):
        net(batches(step)[dist.get_rank()], gate).backward()
        reference_backward(reference, step, (gate, gate))
    with pytest.raises(GradientSyncError, match=r"not ready: .*gate\.weight \(1 of 2 accumulations\)"):
        synchronizer.wait()
    synchronizer.finish()
    synchronizer.wait()
    assert_same_gradients(net, reference)


@distributed(ranks=2)
def test_accumulation_after_the_reduction_is_named() -> None:
    """One accumulation too many raises at once and at wait, naming the parameter; the step can be dropped."""
    net, reference = make_net(), make_net()
    synchronizer = start(net, 1)
    net(batches(0)[dist.get_rank()]).backward()
    with pytest.raises(GradientSyncError, match=r"last\.bias \(2 of 1 accumulations\)"):
        net(batches(0)[dist.get_rank()]).backward()
    with pytest.raises(GradientSyncError, match=r"last\.bias"):
        synchronizer.wait()
    synchronizer.abandon()
    assert all(parameter.grad is None for parameter in net.parameters())
    net(batches(1)[dist.get_rank()]).backward()
    synchronizer.finish()
    synchronizer.wait()
    reference_backward(reference, 1)
    assert_same_gradients(net, reference)


@distributed(ranks=2)
def test_accumulation_after_finish_is_named() -> None:
    """An accumulation between finish and wait is an error even where the count is unknown."""
    net = make_net()
    synchronizer = start(net, None)
    synchronizer.finish()
    with pytest.raises(GradientSyncError, match=r"last\.bias \(1 of unknown"):
        net(batches(0)[dist.get_rank()]).backward()
    synchronizer.abandon()


@distributed(ranks=2)
def test_zero_grad_during_a_reduction_is_refused() -> None:
    """Zeroing what is being reduced is an error that says what to call."""
    net = make_net()
    synchronizer = start(net, 1)
    net(batches(0)[dist.get_rank()]).backward()
    with pytest.raises(GradientSyncError, match=r"call wait\(\) first"):
        synchronizer.zero_grad()
    synchronizer.finish()
    synchronizer.wait()


@distributed(ranks=2)
def test_parameter_tied_over_two_stages_has_its_own_count() -> None:
    """A parameter that two parts of this rank accumulate into waits for both; the others start earlier."""
    net = make_net()
    synchronizer = start(net, 1)
    tied = net.first.weight
    synchronizer.set_required_accumulations(1, {tied: 2})
    launched = {}
    (tied.sum() * 3 + net.last.weight.sum()).backward()
    launched["after one"] = [bucket.launched for bucket in synchronizer.buckets if bucket.slots[0].parameter is tied]
    (tied.sum() * (1 + dist.get_rank())).backward()
    synchronizer.finish()
    synchronizer.wait()
    assert launched["after one"] == [False]
    assert (tied.grad == 4.5).all()
    assert (net.last.weight.grad == 1).all()


@distributed(ranks=2)
def test_requirement_below_what_was_counted_is_refused() -> None:
    """Lowering a count below what has already arrived is an error, not a missed reduction."""
    weight = nn.Parameter(torch.ones(2))
    synchronizer = GradientSynchronizer([[("w", weight)]], 25, 3)
    synchronizer.bind(mesh=dist.group.WORLD)
    weight.sum().backward()
    weight.sum().backward()
    with pytest.raises(GradientSyncError, match=r"w \(2 of 1 accumulations\)"):
        synchronizer.set_required_accumulations(1)
    synchronizer.abandon()


@distributed(ranks=2)
def test_replicas_that_become_ready_in_opposite_order() -> None:
    """Buckets are launched in one order on all replicas, whatever order their gradients arrive in."""
    weights = [nn.Parameter(torch.ones(size)) for size in (3, 5, 7)]
    synchronizer = GradientSynchronizer([weights], 0, 1)
    synchronizer.bind(mesh=dist.group.WORLD)
    for step in range(STEPS):
        order = weights if dist.get_rank() == 0 else list(reversed(weights))
        for weight in order:
            (weight.sum() * (dist.get_rank() + step)).backward()
        synchronizer.wait()
        assert all(torch.equal(w.grad, torch.full_like(w, step + 0.5)) for w in weights)
        synchronizer.zero_grad()


@distributed(ranks=2)
def test_order_of_the_first_step_is_learned_from_one_replica() -> None:
    """After the first step all replicas launch in the order in which the first replica's buckets became ready."""
    weights = [nn.Parameter(torch.ones(size)) for size in (3, 5, 7)]
    synchronizer = GradientSynchronizer([weights], 0, 1)
    synchronizer.bind(mesh=dist.group.WORLD)
    sizes = lambda: [bucket.slots[0].parameter.numel() for bucket in synchronizer.buckets]  # noqa: E731
    assert sizes() == [7, 5, 3]
    for index in (1, 0, 2) if dist.get_rank() == 0 else (0, 1, 2):
        weights[index].sum().backward()
    synchronizer.wait()
    assert sizes() == [5, 3, 7]


@distributed(ranks=2)
def test_replicas_with_different_parameters_are_told_at_bind() -> None:
    """Replicas with different trainable parameters are refused on every rank, naming the first difference."""
    net = make_net()
    net.gate.bias.requires_grad_(dist.get_rank() == 0)
    with pytest.raises(GradientSyncError, match=r"gate\.bias.*requires_grad=True.*requires_grad=False"):
        start(net)


@distributed(ranks=2)
def test_reduction_starts_inside_backward() -> None:
    """The last layers' bucket is under way before the first layer's gradient exists."""
    net = make_net()
    seen = []
    net.first.weight.register_post_accumulate_grad_hook(
        lambda _: seen.append([(b.slots[0].name, b.launched) for b in synchronizer.buckets])
    )
    synchronizer = start(net, 1)
    for unused in (net.idle, net.gate):
        unused.requires_grad_(False)
    synchronizer.zero_grad()
    net(batches(0)[dist.get_rank()], use_gate=False).backward()
    synchronizer.wait()
    states = dict(seen[0])
    assert states["last.bias"]
    assert states["last.weight"]
    assert not states["first.weight"]


@distributed(ranks=2)
def test_accumulate_only_batches_are_reduced_once() -> None:
    """Batches inside no_sync are summed locally and reduced with the last one; a parameter used only there counts."""
    net, reference = make_net(), make_net()
    synchronizer = start(net, 1)
    for window in range(2):
        for step, gate in enumerate([True, False, False]):
            last = step == 2
            with contextlib.nullcontext() if last else synchronizer.no_sync():
                net(batches(step + window)[dist.get_rank()], gate).backward()
                assert last or not any(bucket.launched for bucket in synchronizer.buckets)
            reference_backward(reference, step + window, (gate, gate))
        with synchronizer.no_sync(), pytest.raises(GradientSyncError, match="leave the block"):
            synchronizer.finish()
        synchronizer.finish()
        synchronizer.wait()
        assert_same_gradients(net, reference)
        net.zero_grad()
        reference.zero_grad()


@distributed(ranks=2)
def test_gradients_that_come_without_hooks() -> None:
    """Gradients written by hand are reduced as soon as the caller marks their parameters done."""
    net, reference = make_net(), make_net()
    synchronizer = start(net, None, size=25)
    used = [parameter for name, parameter in net.named_parameters() if not name.startswith("idle")]
    for step in range(2):
        loss = net(batches(step)[dist.get_rank()])
        for parameter, gradient in zip(used, torch.autograd.grad(loss, used), strict=True):
            parameter.grad = gradient
        synchronizer.mark_done([*net.parameters(), torch.ones(1)])
        assert all(bucket.launched for bucket in synchronizer.buckets)
        synchronizer.wait()
        reference_backward(reference, step)
        assert_same_gradients(net, reference)
        net.zero_grad()
        reference.zero_grad()


@distributed(ranks=2)
def test_counts_extrapolated_from_the_first_backward() -> None:
    """Told how often the first backward repeats, buckets leave inside the last one; what it did not reach waits."""
    net, reference = make_net(), make_net()
    synchronizer = start(net, None)
    for window in range(2):
        for number, gate in enumerate([False, True, False]):
            net(batches(3 * window + number)[dist.get_rank()], gate).backward()
            reference_backward(reference, 3 * window + number, (gate, gate))
            if number == 0:
                synchronizer.expect_repeats([*net.parameters(), torch.ones(1)], 3)
            launched = {bucket.slots[0].name for bucket in synchronizer.buckets if bucket.launched}
            assert ("last.weight" in launched) == (number == 2)
            assert "gate.weight" not in launched
        synchronizer.finish()
        synchronizer.wait()
        assert_same_gradients(net, reference)
        net.zero_grad()
        reference.zero_grad()


@distributed(ranks=2)
def test_accumulation_after_mark_done_is_named() -> None:
    """Who said that a parameter is done and accumulates again is told so."""
    net = make_net()
    synchronizer = start(net, None)
    synchronizer.mark_done([net.last.bias])
    with pytest.raises(GradientSyncError, match=r"last\.bias"):
        net(batches(0)[dist.get_rank()]).backward()
    synchronizer.abandon()


@distributed(ranks=2)
def test_unbind_gives_the_parameters_back() -> None:
    """After unbind nothing listens, nothing is shared, and a second bind works."""
    net = make_net()
    synchronizer = start(net)
    synchronizer.unbind()
    net(batches(0)[dist.get_rank()]).backward()
    assert all(not parameter._post_accumulate_grad_hooks for parameter in net.parameters())
    assert net.first.weight.grad.untyped_storage().nbytes() == net.first.weight.grad.numel() * 4
    synchronizer.bind(mesh=dist.group.WORLD)
    synchronizer.finish()
    synchronizer.wait()
    assert net.idle.weight.grad is None
