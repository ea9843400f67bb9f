"""Whatever the user does to gradients, two replicas end with those of one device on the same global batch."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from d9d_lightning.errors import GradientSyncError
from d9d_lightning.gradients import GradientSynchronizer
from d9d_lightning.testing import distributed

STEPS = 3


class Net(nn.Module):
    """Three layers; ``gate`` is used where the batch says so, ``idle`` never."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.gate = nn.Linear(6, 6)
        self.idle = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, batch: torch.Tensor, use_gate: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.first(batch))
        if use_gate:
            hidden = hidden + self.gate(hidden)
        return self.last(hidden).square().mean()


def make_net() -> Net:
    torch.manual_seed(7)
    return Net()


def batches(step: int) -> list[torch.Tensor]:
    """The global batch of one step: one part per replica. ``[replica][samples, features]``"""
    generator = torch.Generator().manual_seed(step)
    return list(torch.randn(2, 5, 4, generator=generator).unbind())


def start(net: nn.Module, count: int | None = 1, size: float = 0.0, **options: object) -> GradientSynchronizer:
    synchronizer = GradientSynchronizer([list(net.named_parameters())], size, count, **options)
    synchronizer.bind(mesh=dist.group.WORLD)
    return synchronizer


def assert_same_gradients(net: nn.Module, reference: nn.Module) -> None:
    for (name, mine), theirs in zip(net.named_parameters(), reference.parameters(), strict=True):
        if theirs.grad is None:
            assert mine.grad is None, name
        else:
            torch.testing.assert_close(mine.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


def assert_same_parameters(net: nn.Module, reference: nn.Module) -> None:
    for (name, mine), theirs in zip(net.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=lambda text, name=name: f"{name}: {text}")


def reference_backward(net: nn.Module, step: int, gates: tuple[bool, bool] = (True, True)) -> None:
    """One device: the mean over both replicas' parts."""
    parts = batches(step)
    (sum(net(part, gate) for part, gate in zip(parts, gates, strict=True)) / 2).backward()


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
