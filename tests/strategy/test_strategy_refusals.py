"""Bad input gets one readable error, before anything is started."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging

from d9d_lightning import D9DStrategy
from d9d_lightning.errors import PipelineConfigurationError, PipelineError
from tests.strategy.strategy_cases import QUIET, Classifier, fit, make_loader, pipeline


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("schedule", "zbw", "Schedules: gpipe"),
        ("schedule", 3, "PipelineProgramBuilder"),
        ("pipeline_parallel_size", 0, "at least 1"),
        ("pipeline_parallel_size", "all", '"auto"'),
        ("data_parallel_size", 1.5, ">= 1"),
        ("tensor_parallel_size", 2, "reserved"),
        ("num_microbatches", True, "at least 1"),
        ("units", "net.blocks.*", "list of names"),
        ("split_points", [3], "list of names"),
        ("owner_only_hooks", "on_train_epoch_end", "list of names"),
        ("bucket_size_mb", -1, "positive"),
        ("gradient_dtype", "float8", "bfloat16"),
        ("save_distributed_checkpoint", "yes", "True or False"),
        ("broadcast_batches", 1, "True or False"),
        ("process_group_backend", 5, "gloo"),
        ("process_group_backend", "glo", "gloo"),
        ("batch_spec", {"ids": 0}, "SpecShard"),
        ("timeout", 0, "positive"),
        ("start_method", "thread", "popen"),
    ],
)
def test_every_argument_says_what_was_given_and_what_to_type(argument, value, expected):
    """A wrong argument is refused with its value, the allowed values and a line to type."""
    with pytest.raises(PipelineConfigurationError) as refused:
        D9DStrategy(**{argument: value})
    text = str(refused.value)
    assert argument in text
    assert repr(value) in text
    assert expected in text
    assert "Type D9DStrategy(" in text


class Returns(Classifier):
    """Its step returns what it is told."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def training_step(self, batch, batch_idx):
        loss, logits = self.loss_of(batch)
        return {"none": None, "vector": logits.mean(1), "number": 1.0, "no loss": {"other": loss}}[self.output]


@pytest.mark.parametrize(
    ("output", "expected"),
    [("none", "returned None"), ("vector", "shape (2,)"), ("number", "float"), ("no loss", "'other'")],
)
def test_a_step_that_returns_no_scalar_is_named(output, expected):
    """``training_step`` returning None, a vector, a number or no loss raises one error that says what to return."""
    with pytest.raises(PipelineError, match="training_step") as refused:
        fit(pipeline(), lambda: Returns(output))
    assert expected in str(refused.value)
    assert "scalar tensor" in str(refused.value)


class Manual(Classifier):
    """Optimizes by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Several(Classifier):
    """Two optimizers."""

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[0].parameters(), 0.1), torch.optim.SGD(self.net[2].parameters(), 0.1)]


class LineSearch(Classifier):
    """Runs the closure as often as it likes."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Pulls(Classifier):
    """Takes its own batches."""

    def training_step(self, dataloader_iter):
        return next(dataloader_iter)


class OwnBackward(Classifier):
    """Differentiates by hand."""

    def backward(self, loss):
        loss.backward(retain_graph=True)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (OwnBackward, "on_after_backward"),
        (Manual, "automatic_optimization"),
        (Several, "one optimizer with a parameter group for each"),
        (LineSearch, "LBFGS"),
        (Pulls, "dataloader_iter"),
    ],
)
def test_what_cannot_be_pipelined_is_refused_by_name(kind, expected):
    """Manual optimization, several optimizers, LBFGS and ``dataloader_iter`` are refused at setup."""
    with pytest.raises((PipelineConfigurationError, RuntimeError), match=expected):
        fit(pipeline(), kind)


def test_stochastic_weight_averaging_is_refused_with_what_to_use():
    """SWA needs the whole module, so it is refused and the exponential average is named."""
    with pytest.raises(PipelineConfigurationError, match="EMAWeightAveraging"):
        fit(pipeline(), callbacks=[StochasticWeightAveraging(0.1)])


def test_a_module_of_the_other_package_is_refused_before_any_process_starts():
    """A ``pytorch_lightning`` module in a ``lightning`` Trainer, and the strategy in the other Trainer, both raise."""
    import pytorch_lightning

    class Foreign(pytorch_lightning.LightningModule):
        pass

    trainer = L.Trainer(strategy=D9DStrategy(), max_epochs=1, **QUIET)
    with pytest.raises(PipelineConfigurationError, match=r"`pytorch_lightning`.*import lightning as L"):
        trainer.fit(Foreign(), make_loader())
    with pytest.raises(ValueError, match=r"lightning.pytorch strategy D9DStrategy"):
        pytorch_lightning.Trainer(strategy=D9DStrategy(), max_epochs=1, **QUIET)
    with pytest.raises(PipelineConfigurationError, match="import lightning as L"):
        pytorch_lightning.Trainer(strategy="d9d_zbv", max_epochs=1, **QUIET)


def test_a_world_that_the_axes_do_not_divide_is_refused():
    """Sizes that do not multiply to the number of processes say which number of devices would fit."""
    with pytest.raises(PipelineConfigurationError, match=r"Trainer\(devices=2\)"):
        fit(pipeline(pipeline_parallel_size=2))
    with pytest.raises(PipelineConfigurationError, match=r"Trainer\(devices=3\)"):
        fit(pipeline(data_parallel_size=3))


def test_a_batch_without_a_tensor_is_refused():
    """A loader of strings has nothing to compute with, and the error says so."""
    with pytest.raises(PipelineConfigurationError, match="holds no tensor"):
        fit(pipeline(), loader=[["a", "b"], ["c", "d"]])
