"""The strategy at pipeline size 1 against the plain Trainer: same batches, numbers, files and decisions."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional as F

from d9d_lightning import D9DStrategy
from tests.strategy.strategy_cases import QUIET, Classifier, fit, largest_difference, make_data, make_loader, pipeline


def numbers(metrics):
    """Plain floats."""
    return {key: float(value) for key, value in metrics.items()}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_parameters_losses_and_metrics_equal_the_plain_trainer(accumulate, clip):
    """Every parameter, loss and metric of every batch equals one device's."""
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    plain, plain_trainer, plain_seen = fit("auto", val=make_loader(), **options)
    piped, piped_trainer, piped_seen = fit(pipeline(), val=make_loader(), **options)
    assert largest_difference(plain.state_dict(), piped.state_dict()) < 2e-6
    assert piped_seen.losses == pytest.approx(plain_seen.losses, abs=1e-6)
    assert len(plain_seen.metrics) == len(piped_seen.metrics) == 8
    for ours, theirs in zip(piped_seen.metrics, plain_seen.metrics, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)
    assert piped_trainer.global_step == plain_trainer.global_step
    ours, theirs = (numbers(trainer.logged_metrics) for trainer in (piped_trainer, plain_trainer))
    assert ours == pytest.approx(theirs, abs=1e-6)
    assert piped_trainer.progress_bar_metrics == pytest.approx(plain_trainer.progress_bar_metrics, abs=1e-6)


def test_the_literal_line_of_the_readme_trains_on_one_device():
    """``Trainer(strategy=D9DStrategy(schedule="zbv")).fit(module, loader)`` runs where there is one device."""
    module = Classifier()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    trainer = L.Trainer(strategy=D9DStrategy(schedule="zbv"), max_steps=2, **QUIET)
    trainer.fit(module, make_loader())
    assert trainer.global_step == 2
    assert largest_difference(before, module.state_dict()) > 0


def test_validate_test_and_predict_equal_the_plain_trainer():
    """Evaluation gives the same values, and predict every sample once and in order, with and without a fit before."""
    results = []
    for strategy in ("auto", pipeline()):
        L.seed_everything(7, verbose=False)
        module = Classifier()
        trainer = L.Trainer(strategy=strategy, devices=1, max_epochs=1, **QUIET)
        before = trainer.validate(module, make_loader(), verbose=False)
        trainer.fit(module, make_loader())
        after = trainer.validate(module, make_loader(), verbose=False)
        tested = trainer.test(module, [make_loader(), make_loader(10)], verbose=False)
        predicted = torch.cat(trainer.predict(module, make_loader()))
        results.append((before, after, tested, predicted))
    for plain, piped in zip(results[0][:3], results[1][:3], strict=True):
        assert [dict(one) for one in piped] == [pytest.approx(dict(one), abs=1e-6) for one in plain]
    torch.testing.assert_close(results[0][3], results[1][3])


def test_callbacks_take_the_same_decisions(tmp_path):
    """Early stopping, checkpoint names, learning rates and the CSV file are those of one device."""
    seen = []
    for name, strategy in (("plain", "auto"), ("piped", pipeline())):
        folder = tmp_path / name
        keep = ModelCheckpoint(
            folder, monitor="val_loss", save_top_k=2, filename="{epoch}-{val_loss:.3f}", save_last=True
        )
        stop = EarlyStopping("val_loss", patience=1, min_delta=0.5)
        logger = CSVLogger(folder, name="log", version=0)
        fit(
            strategy,
            val=make_loader(),
            max_epochs=6,
            callbacks=[keep, stop, LearningRateMonitor("step")],
            logger=logger,
            log_every_n_steps=1,
            enable_checkpointing=True,
        )
        rows = (folder / "log" / "version_0" / "metrics.csv").read_text().splitlines()
        seen.append((sorted(path.name for path in folder.glob("*.ckpt")), stop.stopped_epoch, len(rows), rows[0]))
    assert seen[0] == seen[1]
    assert seen[0][1] > 0


def test_a_checkpoint_is_plain_and_resuming_is_exact(tmp_path):
    """The file loads strictly into the bare module, and training goes on from it as if it had never stopped."""
    whole, _, unbroken = fit(pipeline(), max_epochs=4)
    _, trainer, first = fit(pipeline(), max_epochs=2)
    trainer.save_checkpoint(tmp_path / "middle.ckpt")
    bare = Classifier.load_from_checkpoint(tmp_path / "middle.ckpt", weights_only=True)
    assert isinstance(bare, Classifier)
    for strategy in (pipeline(), "auto"):
        L.seed_everything(7, verbose=False)
        module = Classifier()
        resumed = L.Trainer(strategy=strategy, devices=1, max_epochs=4, **QUIET)
        resumed.fit(module, make_loader(), ckpt_path=tmp_path / "middle.ckpt")
        assert resumed.global_step == 16
    ordered, _, _ = fit(pipeline(), max_epochs=4, loader=make_loader())
    L.seed_everything(7, verbose=False)
    module = Classifier()
    half = L.Trainer(strategy=pipeline(), devices=1, max_epochs=2, **QUIET)
    half.fit(module, make_loader())
    half.save_checkpoint(tmp_path / "ordered.ckpt")
    again = Classifier()
    L.Trainer(strategy=pipeline(), devices=1, max_epochs=4, **QUIET).fit(
        again, make_loader(), ckpt_path=tmp_path / "ordered.ckpt", weights_only=True
    )
    assert largest_difference(ordered.state_dict(), again.state_dict()) == 0
    assert len(unbroken.losses) == 2 * len(first.losses)
    assert whole is not None


class TokenWeighted(Classifier):
    """Means over unequal numbers of tokens, weighted by them."""

    def training_step(self, batch, batch_idx):
        features, labels = batch
        counted = labels != 0
        losses = F.cross_entropy(self.net(features), labels, reduction="none")
        weight = counted.sum()
        return {"loss": (losses * counted).sum() / weight.clamp(min=1), "loss_weight": weight}


class TokenMean(Classifier):
    """The same mean over the whole batch."""

    def training_step(self, batch, batch_idx):
        features, labels = batch
        counted = labels != 0
        return (F.cross_entropy(self.net(features), labels, reduction="none") * counted).sum() / counted.sum()


def test_a_weighted_loss_equals_the_mean_over_the_whole_batch():
    """``loss_weight`` makes unequal microbatches count as their tokens, so the split does not change the gradients."""
    plain, _, seen = fit("auto", TokenMean, max_epochs=3)
    piped, _, weighted = fit(pipeline(), TokenWeighted, max_epochs=3)
    assert largest_difference(plain.state_dict(), piped.state_dict()) < 2e-6
    assert weighted.losses == pytest.approx(seen.losses, abs=1e-6)


class Hooked(Classifier):
    """Writes down the order of everything that happens to one batch."""

    def __init__(self):
        super().__init__()
        self.order = []

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer):
        self.order.append("zero")

    def on_before_backward(self, loss):
        self.order.append("before_backward")

    def on_after_backward(self):
        self.order.append("after_backward")
        self.has_gradients = all(p.grad is not None for p in self.net.parameters())

    def on_before_optimizer_step(self, optimizer):
        self.order.append("before_step")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.order.append("end")


def test_hooks_of_a_batch_come_once_and_in_order():
    """Each hook runs once a batch, gradients exist when ``on_after_backward`` runs."""
    module, _, _ = fit(pipeline(), Hooked, max_epochs=1, limit_train_batches=2)
    plain, _, _ = fit("auto", Hooked, max_epochs=1, limit_train_batches=2)
    assert module.order == plain.order == ["zero", "before_backward", "after_backward", "before_step", "end"] * 2
    assert module.has_gradients


def test_a_second_fit_goes_on_counting_steps():
    """``global_step`` and the optimizer of a second fit are those of one device."""
    steps = []
    for strategy in ("auto", pipeline()):
        module, trainer, _ = fit(strategy, max_epochs=1)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, make_loader())
        steps.append(trainer.global_step)
    assert steps[0] == steps[1] == 8


def test_explain_shows_stages_without_starting_anything():
    """Units, ranks, sizes, boundaries and the bubble are shown for any number of ranks, and the module is as before."""
    module = Classifier()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    text = D9DStrategy(schedule="1f1b", num_microbatches=3).explain(module, make_data().tensors, ranks=3)
    lines = text.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == [f"stage {n} on rank {n}" for n in range(3)]
    assert "net.0" in lines[0]
    assert "net.4" in lines[2]
    assert lines[3].startswith("3 microbatches of 8, predicted bubble")
    assert largest_difference(before, module.state_dict()) == 0
    assert not torch.distributed.is_initialized()
