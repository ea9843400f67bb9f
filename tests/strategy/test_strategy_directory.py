"""Directory checkpoints: a rank reads what it owns, hooks may change it, and objects that are not safe are named."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

from d9d_lightning.errors import UnsafeCheckpointError
from d9d_lightning.partition.placeholder import Placeholder
from d9d_lightning.strategy.stored import StoredEntries, StoredMapping
from d9d_lightning.testing import run_distributed
from tests.strategy.strategy_cases import QUIET, Classifier, Losses, fit, largest_difference, make_loader, pipeline


def read_by_this_rank(folder: str) -> tuple[set[str], set[str], int, int]:
    """Write a directory and resume from it: entries read, entries owned, bytes read, bytes of the whole."""
    path = str(Path(folder) / "parts.ckpt")
    _, trainer, _ = fit(pipeline(schedule="1f1b", save_distributed_checkpoint=True), devices=2, max_epochs=1)
    trainer.save_checkpoint(path)
    read: dict[str, int] = {}
    plain = FileSystemReader.read_data

    def read_data(self: Any, plan: Any, planner: Any) -> Any:
        for item in plan.items:
            name = item.storage_index.fqn
            read[name] = read.get(name, 0) + self.storage_data[item.storage_index].length
        return plain(self, plan, planner)

    FileSystemReader.read_data = read_data
    try:
        module, _, _ = fit(pipeline(schedule="1f1b"), devices=2, max_epochs=2, ckpt=path)
    finally:
        FileSystemReader.read_data = plain
    sizes = FileSystemReader(path).read_metadata().storage_data
    tensors = {index.fqn: stored.length for index, stored in sizes.items() if "param_groups" not in index.fqn}
    held = {name for name, parameter in module.named_parameters() if not isinstance(parameter, Placeholder)}
    own = {f"model.{name}" for name in held}
    own |= {f"optimizer_0.state.{name}.{kind}" for name in held for kind in ("step", "exp_avg", "exp_avg_sq")}
    seen = {name for name in read if "param_groups" not in name}
    return seen, own & tensors.keys(), sum(read[name] for name in seen), sum(tensors.values())


def test_each_rank_reads_what_it_owns_and_nothing_else(tmp_path):
    """On resume a rank reads its own parameters and their optimizer states, each once, and no byte of another's."""
    ranks = run_distributed(read_by_this_rank, 2, (str(tmp_path),), init_group=False)
    assert all(seen == own for seen, own, _, _ in ranks)
    assert sum(read for *_, read, _ in ranks) == ranks[0][3]
    assert all(0 < read < whole for *_, read, whole in ranks)


class Config:
    """What people pass to ``save_hyperparameters``."""

    width = 8


class Configured(Classifier):
    """Its checkpoint holds an object of a class that torch does not know."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = config or Config()
        self.save_hyperparameters({"config": self.config})


def resume(strategy: Any, path: str, weights_only: bool | None) -> list[float]:
    L.seed_everything(7, verbose=False)
    seen = Losses()
    trainer = L.Trainer(**QUIET, strategy=strategy, devices=1, max_epochs=2, callbacks=[seen])
    trainer.fit(Configured(), make_loader(), ckpt_path=path, weights_only=weights_only)
    return seen.losses


@pytest.mark.parametrize("directory", [False, True], ids=["file", "directory"])
def test_objects_that_are_not_read_unasked_are_named_with_what_to_type(tmp_path, directory):
    """Where a plain run cannot read hyperparameters of one's own class, the error says so, and its remedies work."""
    ours, plain = str(tmp_path / "ours.ckpt"), str(tmp_path / "plain.ckpt")
    for strategy, path in ((pipeline(save_distributed_checkpoint=directory), ours), ("auto", plain)):
        fit(strategy, Configured, loader=make_loader(), max_epochs=1)[1].save_checkpoint(path)
    assert Path(ours).is_dir() == directory
    for weights_only in (None, True):
        with pytest.raises(pickle.UnpicklingError):
            resume("auto", plain, weights_only)
        with pytest.raises(UnsafeCheckpointError, match=r"test_strategy_directory\.Config.*\n?.*weights_only=False"):
            resume(pipeline(), ours, weights_only)
    expected = resume("auto", plain, False)
    assert resume(pipeline(), ours, False) == pytest.approx(expected, abs=2e-6)
    with torch.serialization.safe_globals([Config]):
        assert resume(pipeline(), ours, None) == pytest.approx(expected, abs=2e-6)


class Renames(Classifier):
    """Reads checkpoints of an older version of itself."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        for name in list(state):
            if name.startswith("net."):
                state[f"layers.{name}"] = state.pop(name)
        state["layers.net.0.bias"].zero_()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"net": self.net})
        del self.net

    def loss_of(self, batch: Any) -> Any:
        logits = self.layers["net"](batch[0])
        return nn.functional.cross_entropy(logits, batch[1]), logits


def rename(path: str) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    trainer = fit(pipeline(), Renames, devices=2, max_steps=0)[1]
    trainer.validate(trainer.lightning_module, make_loader(), ckpt_path=path, verbose=False)
    with trainer.strategy.whole_module() as module:
        return {key: value.clone() for key, value in module.state_dict().items()}


@pytest.mark.full
def test_a_hook_may_rename_and_change_what_is_read(tmp_path):
    """``on_load_checkpoint`` sees the names and tensors of a directory as those of a file, and what it does holds."""
    path = str(tmp_path / "old.ckpt")
    old, trainer, _ = fit(pipeline(save_distributed_checkpoint=True), max_epochs=1)
    trainer.save_checkpoint(path)
    expected = {name.replace("net.", "layers.net."): value for name, value in old.state_dict().items()}
    expected["layers.net.0.bias"] = torch.zeros(8)
    for found in run_distributed(rename, 2, (path,), init_group=False):
        assert largest_difference(found, expected) == 0


def test_a_stored_mapping_behaves_as_the_dict_that_was_saved(tmp_path):
    """Names, shapes, values, nested values, changes and removals are those of a dict."""
    saved = {
        "a": torch.arange(6.0).reshape(2, 3).t(),
        "b.c": torch.ones(2),
        "_extra": {"x": 1, "y": [torch.ones(1), 2]},
    }
    save({"model": saved, "other": torch.zeros(3)}, checkpoint_id=tmp_path, no_dist=True)
    state = StoredMapping(StoredEntries(tmp_path), ("model",))
    assert set(state) == set(saved)
    assert (state.shape_of("a"), state.shape_of("_extra")) == ((3, 2), None)
    torch.testing.assert_close(state["a"], saved["a"], rtol=0, atol=0)
    state["a"].mul_(2)
    torch.testing.assert_close(state.take(["a"])["a"], 2 * saved["a"], rtol=0, atol=0)
    assert state["_extra"] == saved["_extra"]
    state["moved"] = state.pop("b.c")
    assert set(state.copy()) == {"a", "_extra", "moved"}
    assert state.get("b.c") is None
    with pytest.raises(KeyError):
        state["other"]


def test_an_optimizer_without_states_resumes_from_a_directory(tmp_path):
    """SGD without momentum keeps nothing, and a directory written with it is read."""

    class Plain(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def make() -> Any:
        return pipeline(save_distributed_checkpoint=True)

    whole = fit(make(), Plain, loader=make_loader(), max_epochs=2)[2].losses
    _, trainer, begun = fit(make(), Plain, loader=make_loader(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "parts.ckpt")
    rest = fit(make(), Plain, loader=make_loader(), max_epochs=2, ckpt=str(tmp_path / "parts.ckpt"))[2].losses
    assert begun.losses + rest == pytest.approx(whole, abs=1e-6)


class Sharded(Classifier):
    """Its layers are sharded over both processes."""

    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def write_sharded_by_lightning(path: str) -> list[float]:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    # without a sampler both replicas see the batches of one device
    options = {"devices": 2, "max_epochs": 1, "use_distributed_sampler": False}
    _, trainer, seen = fit(strategy, Sharded, loader=make_loader(), **options)
    trainer.save_checkpoint(path)
    return seen.losses


def resume_in_a_pipeline(path: str) -> list[float]:
    return fit(pipeline(), loader=make_loader(), devices=2, max_epochs=2, ckpt=path)[2].losses


@pytest.mark.full
def test_a_directory_of_lightnings_own_strategy_is_resumed_from(tmp_path):
    """What ``ModelParallelStrategy`` wrote from sharded layers continues through a pipeline as an unbroken run does."""
    path = str(tmp_path / "parts.ckpt")
    begun = run_distributed(write_sharded_by_lightning, 2, (path,), init_group=False)[0]
    assert Path(path).is_dir()
    rest = run_distributed(resume_in_a_pipeline, 2, (path,), init_group=False)[0]
    unbroken = fit("auto", loader=make_loader(), max_epochs=2)[2].losses
    assert begun + rest == pytest.approx(unbroken, abs=2e-6)
