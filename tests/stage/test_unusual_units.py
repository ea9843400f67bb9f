"""Units that are compiled, parametrized, scripted or hooked, and recomputed regions around several of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from d9d_lightning.errors import PartitionError
from d9d_lightning.stage.planner import Planner
from tests.parity import StepModule, assert_same_outcome, train_pipeline, train_plain
from tests.parity_basics import CLASSES, WIDTH, Residual, pairs

LAYOUTS = [("zbv", 2, 3), ("zbv", 4, 3), ("1f1b", 2, 4)]


class CompiledInPlace(Residual):
    """``module.compile()`` on every layer."""

    backend = "eager"

    def __init__(self) -> None:
        super().__init__()
        for layer in self.blocks:
            layer.compile(backend=self.backend)


class CompiledWrapper(Residual):
    """``torch.compile(module)`` around every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(torch.compile(layer, backend="eager") for layer in self.blocks)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


class Parametrized(Residual):
    """Weights computed from other weights at every use."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.blocks:
            nn.utils.parametrize.register_parametrization(layer[0], "weight", Symmetric())


class WeightNorm(Residual):
    """Weights of a trained norm and direction."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.blocks:
            nn.utils.parametrizations.weight_norm(layer[0])


class SpectralNorm(Residual):
    """Weights scaled by an estimate that every forward refines."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.blocks:
            nn.utils.parametrizations.spectral_norm(layer[0])


class TwiceTheSame(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.linear(x))
        return y, y


class SameTensorTwice(Residual):
    """Units that return one tensor in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwiceTheSame() for _ in range(5))

    def body(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            one, other = layer(x)
            assert one is other
            x = one + 2 * other
        return x


class PassesOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.linear(x)


class InputUnchanged(Residual):
    """Units that return their input beside something new."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PassesOn() for _ in range(5))

    def body(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            same, new = layer(x)
            x = same + torch.tanh(new)
        return x


class BackwardHooks(Residual):
    """Hooks on gradients: of a module, of a tensor in glue, and one that keeps a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].register_full_backward_hook(halve)

    def body(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.blocks):
            x = x + layer(x)
            if index == 1:
                x.register_hook(lambda gradient: gradient * 0.5)
            if index == 2:
                x.retain_grad()
        return x


def halve(module: nn.Module, given: Any, received: Any) -> tuple[Tensor]:
    return (given[0] * 0.5,)


class Regions(Residual):
    """Two recomputed regions around several layers, with glue in them that saves what it computes."""

    reentrant = False

    def body(self, x: Tensor) -> Tensor:
        def run(x: Tensor, first: int, last: int) -> Tensor:
            for layer in list(self.blocks)[first:last]:
                x = torch.tanh(x + layer(x)).exp()
            return x

        x = self.blocks[0](x)
        x = checkpoint(run, x, 1, 3, use_reentrant=self.reentrant)
        return checkpoint(run, x, 3, 6, use_reentrant=self.reentrant)


class ReentrantRegions(Regions):
    """The same, reentrant."""

    reentrant = True


class RegionThatWrites(Residual):
    """A recomputed region that changes what a layer gave in place."""

    def body(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            for layer in list(self.blocks)[1:4]:
                x = torch.tanh((layer(x) + 0).mul_(2).sigmoid_()) * x
            return x

        x = checkpoint(run, self.blocks[0](x), use_reentrant=False)
        return x + self.blocks[5](self.blocks[4](x))


class RegionCalledTwice(Residual):
    """One layer inside two recomputed regions."""

    def body(self, x: Tensor) -> Tensor:
        for index in (0, 1, 1, 2, 3):
            x = checkpoint(lambda y, layer: torch.sin(layer(y)) * y, x, self.blocks[index], use_reentrant=False)
        return x


class SequentialRegions(Residual):
    """``checkpoint_sequential`` over the whole list."""

    def body(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(nn.Sequential(*self.blocks), 3, x, use_reentrant=False)


class FunctionalCall(Residual):
    """Layers called with weights that glue computed."""

    def body(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            scaled = {name: parameter * 1.1 for name, parameter in layer.named_parameters()}
            x = x + torch.func.functional_call(layer, scaled, (x,))
        return x


class Complex(StepModule):
    """Complex, conjugated activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.complex64) for _ in range(5))
        self.head = nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = torch.complex(batch[0], batch[0].flip(1))
        for layer in self.layers:
            x = layer(x)
            x = (x / (1 + x.abs())).conj()
        return F.cross_entropy(self.head(x.real), batch[1])


class Recurrent(StepModule):
    """States handed from one recurrent layer to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, state = batch[0][:, None] * torch.arange(1, 5)[None, :, None] * 0.3, None
        for layer in self.layers:
            x, state = layer(x, state)
        assert state is not None
        return F.cross_entropy(self.head(x[:, -1]) + state[0][0].mean(-1, keepdim=True), batch[1])


KINDS = [
    CompiledInPlace, CompiledWrapper, Parametrized, WeightNorm, SpectralNorm, SameTensorTwice, InputUnchanged,
    BackwardHooks, Regions, ReentrantRegions, RegionThatWrites, RegionCalledTwice, SequentialRegions, FunctionalCall,
    Complex, Recurrent,
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "ranks", "count"), LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_unusual_units_train_as_on_one_device(
    kind: Callable[[], StepModule], schedule: str, ranks: int, count: int
) -> None:
    """Whatever torch does around a layer, training equals one device that accumulates the same microbatches."""
    torch.manual_seed(0)
    module, batches = kind(), [pairs(index) for index in range(3)]
    got = train_pipeline(module, batches, count, schedule=schedule, ranks=ranks)
    assert_same_outcome(module, train_plain(module, batches, count), got)


@pytest.mark.full
def test_layers_compiled_by_default_train_as_on_one_device() -> None:
    """Layers compiled with the default backend train as on one device, and a trace does not stop their compilation."""

    class Compiled(CompiledInPlace):
        backend = "inductor"

    torch.manual_seed(0)
    module, batches = Compiled(), [pairs(index) for index in range(2)]
    got = train_pipeline(module, batches, 2, schedule="zbv", ranks=2)
    assert_same_outcome(module, train_plain(module, batches, 2), got)


def test_scripted_layers_train_as_on_one_device() -> None:
    """TorchScript layers run whole on their stage."""

    def train(pipeline: bool) -> list[Tensor]:
        torch.manual_seed(0)
        module = Residual()
        module.blocks = nn.ModuleList(torch.jit.script(layer) for layer in module.blocks)
        planner = Planner(module)
        if not pipeline:
            for size in (4, 4):
                (module.training_step(pairs(1, size), 0) / 2).backward()
        else:
            from d9d_lightning.schedule import build_program
            from d9d_lightning.testing.pipeline import LocalPipeline
            from d9d_lightning.values import Microbatch

            pieces = [Microbatch(index, 4, (pairs(1, 4), 0), (index,)) for index in range(2)]
            program = build_program("zbv", pp_size=2, num_microbatches=2)
            step = lambda piece: module.training_step(*piece.args)  # noqa: E731
            LocalPipeline(module, planner).run(step, pieces, program, lambda piece, loss: loss / 2)
        return [parameter.grad for parameter in module.parameters()]  # type: ignore[misc]

    for one, other in zip(train(False), train(True), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_lazy_layers_are_refused_by_name() -> None:
    """Parameters without a shape are an error that names them and what to do."""
    module = Residual()
    module.head = nn.LazyLinear(CLASSES)
    with pytest.raises(
        PartitionError, match=r"'head\.weight'.*have no shape yet.*nn\.Linear instead of nn\.LazyLinear"
    ):
        Planner(module)
