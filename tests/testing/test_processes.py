"""The process aids: every rank runs, every failure is shown, nothing hangs, workers are replaced."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from d9d_lightning.errors import WorkerError
from d9d_lightning.testing import collect_outcomes, distributed, run_distributed


@pytest.fixture
def number() -> int:
    return 7


def rank_and_pid(scale: int) -> tuple[int, int]:
    total = torch.tensor([float(dist.get_rank() * scale)])
    dist.all_reduce(total)
    return int(total.item()), os.getpid()


def raise_on_one() -> None:
    if dist.get_rank() == 1:
        secret = 41
        assert secret == 42
    dist.barrier()


def raise_everywhere() -> None:
    raise KeyError(f"rank {dist.get_rank()}")


def hang_on_one() -> None:
    if dist.get_rank() == 0:
        threading.Event().wait()


def kill_one() -> str:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError as error:
        return str(error)
    return ""


def leave() -> None:
    print("last words")
    os._exit(3)


def environment() -> tuple[str | None, bool, int, str | None]:
    return os.environ.get("RANK"), dist.is_initialized(), torch.get_num_threads(), os.environ.get("GIVEN")


def leave_state_behind() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)


def state() -> tuple[torch.dtype, bool, float]:
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.rand(()).item()


def skip_here() -> None:
    pytest.skip("not today")


def make_mesh() -> int:
    mesh = init_device_mesh("cpu", (2,))
    weight = torch.nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Replicate()]))
    (weight.to_local() * 2).sum().backward()
    assert weight.device_mesh.get_group(0).size() == 2
    return os.getpid()


@distributed(ranks=2)
@pytest.mark.parametrize("value", [3])
def test_decorated_function_runs_in_a_group_with_fixtures(tmp_path: Path, number: int, value: int) -> None:
    """A decorated test runs once per rank inside a group, and gets fixtures and parameters."""
    (tmp_path / str(dist.get_rank())).write_text("here")
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    assert (number, value) == (7, 3)
    assert dist.get_world_size() == 2


def test_values_come_back_per_rank_and_workers_are_kept() -> None:
    """Each rank's value is returned in rank order, and the same processes serve the next call."""
    first = run_distributed(rank_and_pid, 2, (5,))
    second = run_distributed(rank_and_pid, 2, (6,))
    assert [total for total, _ in first] == [5, 5]
    assert [total for total, _ in second] == [6, 6]
    assert {pid for _, pid in first} == {pid for _, pid in second}
    assert os.getpid() not in {pid for _, pid in first}


def test_first_failure_stands_on_top_with_its_rank_and_locals() -> None:
    """The traceback of the rank that failed first comes first, with the variables of its assertion."""
    with pytest.raises(WorkerError) as caught:
        run_distributed(raise_on_one, 2)
    text = str(caught.value)
    assert "---- rank 1 raised:" in text
    assert "secret = 41" in text
    if "---- rank 0" in text:
        assert text.index("---- rank 1") < text.index("---- rank 0")


def test_every_rank_that_fails_is_shown() -> None:
    """All tracebacks appear, not only the first."""
    with pytest.raises(WorkerError, match="2 of 2 ranks") as caught:
        run_distributed(raise_everywhere, 2)
    assert "KeyError: 'rank 0'" in str(caught.value)
    assert "KeyError: 'rank 1'" in str(caught.value)


def test_hang_is_killed_with_a_stack() -> None:
    """A rank that hangs is killed at the limit, and the report shows where it stood."""
    with pytest.raises(WorkerError) as caught:
        run_distributed(hang_on_one, 2, timeout=3.0)
    assert "hang_on_one" in str(caught.value).split("its threads:")[1]
    assert "finished without error: ranks 1" in str(caught.value)


def test_killed_worker_is_reported_and_replaced() -> None:
    """A rank killed by a signal is named, its peers' values survive, and the next call works."""
    outcomes = collect_outcomes(kill_one, 2)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert outcomes[0].value != ""
    with pytest.raises(WorkerError, match=r"rank 1 lost its process.*SIGKILL"):
        run_distributed(kill_one, 2)
    assert [total for total, _ in run_distributed(rank_and_pid, 2, (1,))] == [1, 1]


def test_output_and_exit_code_of_a_process_that_leaves() -> None:
    """A rank that ends its process keeps its exit code and its last words."""
    outcome = collect_outcomes(leave, 1)[0]
    assert (outcome.exit_code, outcome.output) == (3, "last words\n")


def test_environment_is_what_torchrun_sets() -> None:
    """Without a group the ranks still find their place in the environment, and use one thread."""
    found = run_distributed(environment, 2, init_group=False, environment={"GIVEN": "x"})
    assert found == [("0", False, 1, "x"), ("1", False, 1, "x")]


def test_nothing_is_left_to_the_next_call() -> None:
    """Default dtype, gradient mode and random state are as in a new process."""
    before = run_distributed(state, 1)
    run_distributed(leave_state_behind, 1)
    assert run_distributed(state, 1) == before
    assert before[0][:2] == (torch.float32, True)


def test_meshes_of_one_call_do_not_haunt_the_next() -> None:
    """A call that leaves cached device meshes behind gives up its workers, so that the next one has live groups."""
    assert not set(run_distributed(make_mesh, 2)) & set(run_distributed(make_mesh, 2))


def test_skip_in_a_worker_skips_the_test() -> None:
    """A skip raised on a rank reaches pytest as a skip."""
    with pytest.raises(pytest.skip.Exception, match="not today"):
        run_distributed(skip_here, 2)


def test_closures_are_refused_with_a_remedy() -> None:
    """A function that workers cannot import is refused before any of them starts."""
    with pytest.raises(ValueError, match="top level"):
        run_distributed(lambda: None, 1)
