"""A batch over real processes: parity, disagreement, failure, repetition and lockstep."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_lightning.errors import PartitionError, PipelineError, RankFailedError
from d9d_lightning.partition.placeholder import Placeholder
from d9d_lightning.runtime.agreement import BatchMismatchError
from d9d_lightning.runtime.groups import PipelineGroups
from d9d_lightning.runtime.pipeline import Pipeline
from d9d_lightning.schedule import Program, build_program
from d9d_lightning.testing import collect_outcomes, run_distributed
from d9d_lightning.values import Microbatch


class Net(nn.Module):
    """Eight residual layers; the last one sees the first one's output too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8))
        self.head = nn.Linear(8, 3)
        self.extra = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, branch: bool = False) -> Tensor:
        first = x
        for index, layer in enumerate(self.layers):
            x = x + layer(x)
            first = x if index == 0 else first
        out: Tensor = self.head((x + first) * self.scale)
        return out + self.extra(x) if branch else out


def data(size: int = 10, seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(size, 8, generator=source), torch.randint(0, 3, (size,), generator=source)


def pieces(x: Tensor, y: Tensor, count: int = 4, index: int = 0) -> list[Microbatch]:
    parts = zip(x.tensor_split(count), y.tensor_split(count), strict=True)
    return [Microbatch(i, len(a), ((a, b), index), (index, i)) for i, (a, b) in enumerate(parts)]


def make(schedule: str, net: nn.Module, count: int = 4) -> tuple[Pipeline, Program]:
    size = dist.get_world_size()
    made = [dist.new_group(list(range(size))) for _ in range(4)]
    program = build_program(schedule, pp_size=size, num_microbatches=count)
    groups = PipelineGroups(*made, process_of=tuple(range(size)))
    return Pipeline(net, stage_to_rank=program.stage_to_rank, rank=dist.get_rank(), size=size, groups=groups), program


def mean(piece: Microbatch, loss: Tensor) -> Tensor:
    return loss * (piece.size / 10)


def plain_step(net: nn.Module) -> Callable[[Microbatch], Tensor]:
    return lambda piece: F.cross_entropy(net(piece.args[0][0]), piece.args[0][1])


def wrong_gradients(pipeline: Pipeline, expected: dict[str, nn.Parameter]) -> list[str]:
    """Names of this rank's parameters whose gradient is not that of one device."""
    wrong = []
    for name, parameter in pipeline.owned_parameters.items():
        ours, theirs = parameter.grad, expected[name].grad
        if ours is None or theirs is None:
            wrong += [name] if ours is not theirs else []
        elif not torch.allclose(ours, theirs, atol=1e-6):
            wrong.append(name)
    return wrong


def train_and_compare(schedule: str) -> tuple[list[str], list[str], int]:
    torch.manual_seed(0)
    net = Net()
    reference = copy.deepcopy(net)
    pipeline, program = make(schedule, net)
    step = plain_step(net)
    pipeline.place(step, pieces(*data()))
    pipeline.release()
    for seed in range(3):
        pipeline.run(step, pieces(*data(seed=seed)), program, finish=mean)
        x, y = data(seed=seed)
        F.cross_entropy(reference(x), y).backward()
    expected = dict(reference.named_parameters())
    wrong = wrong_gradients(pipeline, expected)
    placeholders = sum(isinstance(p, Placeholder) for p in net.parameters())
    return wrong, sorted(pipeline.owned_parameters), placeholders


@pytest.mark.parametrize(("schedule", "ranks"), [("zbv", 2), ("1f1b", 2), ("zbv", 4), ("gpipe", 4)])
def test_gradients_over_processes_equal_one_device(schedule: str, ranks: int) -> None:
    """Three batches of uneven microbatches leave every parameter the gradient of one device, each on its owner."""
    found = run_distributed(train_and_compare, ranks, (schedule,))
    assert [wrong for wrong, _, _ in found] == [[]] * ranks
    owned = [name for _, names, _ in found for name in names]
    assert sorted(owned) == sorted(name for name, _ in Net().named_parameters())
    assert all(placeholders == len(list(Net().parameters())) - len(names) for _, names, placeholders in found)


def give_other_batch() -> str:
    net = Net()
    pipeline, program = make("1f1b", net)
    step = plain_step(net)
    pipeline.place(step, pieces(*data()))
    pipeline.release()
    with pytest.raises(BatchMismatchError) as caught:
        pipeline.run(step, pieces(*data(seed=dist.get_rank())), program, finish=mean)
    pipeline.run(step, pieces(*data()), program, finish=mean)
    return str(caught.value)


def test_different_batches_are_noticed_before_they_hurt() -> None:
    """Ranks with other samples raise on every rank before any stage runs, and the next batch works."""
    assert all(
        "different batches" in text and "broadcast_batches" in text for text in run_distributed(give_other_batch, 2)
    )


class Failing(nn.Module):
    armed = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if Failing.armed:
            raise ZeroDivisionError("the user's own bug")
        out: Tensor = self.linear(x)
        return out


def fail_once(schedule: str, layer: int) -> tuple[str, str]:
    torch.manual_seed(0)
    net = Net()
    net.layers[layer] = Failing()
    pipeline, program = make(schedule, net)
    step = plain_step(net)
    pipeline.place(step, pieces(*data()))
    pipeline.release()
    pipeline.run(step, pieces(*data()), program, finish=mean)
    Failing.armed = True
    try:
        pipeline.run(step, pieces(*data()), program, finish=mean)
    except Exception as error:
        caught: Exception = error
    else:
        raise AssertionError("nothing was raised")
    finally:
        Failing.armed = False
    pipeline.run(step, pieces(*data()), program, finish=mean)  # the groups are still good
    notes = " ".join(getattr(caught, "__notes__", ()))
    return type(caught).__name__, f"{caught} {notes}"


@pytest.mark.parametrize("schedule", ["zbv", "1f1b", "gpipe"])
@pytest.mark.parametrize("layer", [0, 3, 7])
def test_one_failing_stage_makes_every_rank_raise_and_leaves_the_groups_usable(schedule: str, layer: int) -> None:
    """Every rank raises the user's own error, its traceback and action with it, and the next batch trains."""
    found = run_distributed(fail_once, 2, (schedule, layer))
    kinds = sorted(kind for kind, _ in found)
    assert kinds == sorted(["ZeroDivisionError", RankFailedError.__name__])
    assert all("the user's own bug" in text and "action" in text and "F" in text for _, text in found)


def run_with_late_branch() -> tuple[list[str], int]:
    torch.manual_seed(0)
    net = Net()
    reference = copy.deepcopy(net)
    pipeline, program = make("zbv", net)
    runs: list[int] = []
    restarts: list[int] = []

    def step(piece: Microbatch) -> Tensor:
        x, y = piece.args[0]
        return F.cross_entropy(net(x, branch=piece.args[1] == 1), y)

    def finish(piece: Microbatch, loss: Tensor) -> Tensor:
        runs.append(piece.index)
        return mean(piece, loss)

    pipeline.place(step, pieces(*data()))
    pipeline.release()
    for index in range(3):
        x, y = data()
        pipeline.run(step, pieces(x, y, index=index), program, finish=finish, restart=lambda: restarts.append(1))
        F.cross_entropy(reference(x, branch=index == 1), y).backward()
    expected = dict(reference.named_parameters())
    return wrong_gradients(pipeline, expected), len(restarts)


def test_a_call_that_no_plan_has_makes_the_batch_run_again() -> None:
    """A head that appears in the second batch is traced then, on every rank, and no gradient is counted twice."""
    found = run_distributed(run_with_late_branch, 2)
    assert [wrong for wrong, _ in found] == [[], []]
    assert found[0][1] == found[1][1] >= 1


def read_activations() -> tuple[list[str], list[str]]:
    torch.manual_seed(0)
    net = Net()
    reference = copy.deepcopy(net)
    pipeline, program = make("zbv", net)

    def step_of(module: Net) -> Callable[[Microbatch], Tensor]:
        def step(piece: Microbatch) -> Tensor:
            x, y = piece.args[0]
            for layer in module.layers:
                x = x + layer(x)
                if x.abs().max() * module.scale > 0.5:
                    x = x / x.abs().max().item()
            return F.cross_entropy(module.head(x), y)

        return step

    step = step_of(net)
    pipeline.place(step, pieces(*data()))
    pipeline.release()
    for size in (10, 6):  # the second shape is new after the parameters were given up
        pipeline.run(step, pieces(*data(size)), program, finish=mean)
        for piece in pieces(*data(size)):
            mean(piece, step_of(reference)(piece)).backward()
    expected = dict(reference.named_parameters())
    return wrong_gradients(pipeline, expected), pipeline.planner.notes


def test_a_step_that_reads_activations_is_traced_in_lockstep() -> None:
    """Control flow on activations trains right, also for a shape first seen when no process holds the whole module."""
    found = run_distributed(read_activations, 2)
    assert [wrong for wrong, _ in found] == [[], []]
    assert all("real values" in notes[0] for _, notes in found)


def evaluate_in_lockstep() -> tuple[Any, bool]:
    torch.manual_seed(0)
    net = Net()
    reference = copy.deepcopy(net)
    pipeline, _ = make("zbv", net)
    step = plain_step(net)
    pipeline.place(step, pieces(*data()))
    pipeline.release()
    program = build_program("forward_only", pp_size=2, num_microbatches=4, stages_per_rank=2, style="v")

    def sample(module: nn.Module, piece: Microbatch) -> list[int]:
        x, found = piece.args[0][0], []
        for _ in range(3):
            out = module(x)
            found.append(int(out.argmax(1)[0].item()))
            x = x * (1 + found[-1])
        return found

    results: list[list[int]] = []
    with torch.no_grad():
        outcome = pipeline.run(
            lambda piece: sample(net, piece),
            pieces(*data()),
            program,
            finish=lambda piece, output: results.append(output),
            training=False,
            kind="validation_step",
        )
        expected = [sample(reference, piece) for piece in pieces(*data())]
    return (results == expected) if pipeline.is_loss_owner else (results == []), outcome.lockstep


def test_an_evaluation_step_that_samples_runs_in_lockstep() -> None:
    """A loop that feeds back what it read from the output gives what one device gives."""
    assert run_distributed(evaluate_in_lockstep, 2) == [(True, True), (True, True)]


def run_wrong_program() -> None:
    net = Net()
    pipeline, _ = make("1f1b", net)
    step = plain_step(net)
    pipeline.place(step, pieces(*data()))
    pipeline.run(step, pieces(*data()), build_program("zbv", pp_size=2, num_microbatches=4), finish=mean)


def test_a_program_of_another_placement_is_refused() -> None:
    """A program whose stages live elsewhere is an error that shows both placements."""
    outcomes = collect_outcomes(run_wrong_program, 2)
    assert all(isinstance(outcome.error, PartitionError) or "places its stages" in str(outcome) for outcome in outcomes)


def test_several_ranks_need_groups() -> None:
    """A pipeline of two ranks without process groups says what to give."""
    with pytest.raises(PipelineError, match="PipelineGroups"):
        Pipeline(Net(), stage_to_rank=(0, 1), rank=0, size=2)
