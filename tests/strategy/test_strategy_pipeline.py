"""Two processes, one pipeline: everything a user sees equals one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from d9d_lightning import D9DStrategy
from d9d_lightning.schedule import ZeroBubbleVPipelineProgramBuilder
from d9d_lightning.strategy.programs import schedule_names
from d9d_lightning.testing import run_distributed
from tests.strategy.strategy_cases import fit, largest_difference, make_loader, pipeline


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items()}


def fit_pipeline(folder: str, options: dict[str, Any], trainer_options: dict[str, Any]) -> dict[str, Any]:
    """Train on a pipeline; what this rank saw, and the checkpoint on disk."""
    _, trainer, seen = fit(pipeline(**options), val=make_loader(), devices=2, **trainer_options)
    trainer.save_checkpoint(f"{folder}/two.ckpt")
    return {
        "losses": seen.losses,
        "metrics": seen.metrics,
        "callback": numbers(trainer.callback_metrics),
        "logged": numbers(trainer.logged_metrics),
        "bar": numbers(trainer.progress_bar_metrics),
        "step": trainer.global_step,
        "rank": (trainer.strategy.root_device.type, trainer.is_global_zero),
    }


@pytest.mark.parametrize(
    ("schedule", "accumulate"), [("zbv", 1), ("zbv", 3), ("1f1b", 1), ("gpipe", 2)], ids=lambda v: str(v)
)
def test_a_pipeline_of_two_equals_one_device(tmp_path, schedule, accumulate):
    """Parameters, losses and all metrics of every batch equal one device's, on both ranks."""
    trainer_options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.1}
    first, second = run_distributed(
        fit_pipeline, 2, (str(tmp_path), {"schedule": schedule}, trainer_options), init_group=False
    )
    plain, trainer, seen = fit("auto", val=make_loader(), **trainer_options)
    saved = torch.load(tmp_path / "two.ckpt", weights_only=True)
    assert list(saved["state_dict"]) == list(plain.state_dict())
    assert largest_difference(saved["state_dict"], plain.state_dict()) < 5e-6
    for ours in (first, second):
        assert ours["losses"] == pytest.approx(seen.losses, abs=2e-6)
        for one, other in zip(ours["metrics"], seen.metrics, strict=True):
            assert one == pytest.approx(other, abs=2e-6)
        assert ours["callback"] == pytest.approx(numbers(trainer.callback_metrics), abs=2e-6)
        assert ours["logged"] == pytest.approx(numbers(trainer.logged_metrics), abs=2e-6)
        assert ours["bar"] == pytest.approx(numbers(trainer.progress_bar_metrics), abs=2e-6)
        assert ours["step"] == trainer.global_step
    expected = trainer.strategy.optimizer_state(trainer.optimizers[0])
    assert saved["optimizer_states"][0]["param_groups"] == expected["param_groups"]
    for identifier, state in expected["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(
                saved["optimizer_states"][0]["state"][identifier][key], value, rtol=1e-4, atol=1e-6
            )


def losses_of_every_schedule(names: list[str]) -> dict[str, list[float]]:
    return {name: fit(D9DStrategy(schedule=name), devices=2, max_epochs=1)[2].losses for name in names}


def test_every_schedule_trains_with_default_arguments():
    """Each registered schedule, with everything left to ``"auto"``, gives one device's losses on both ranks."""
    names = list(schedule_names())
    first, second = run_distributed(losses_of_every_schedule, 2, (names,), init_group=False, timeout=240.0)
    _, _, one = fit("auto", max_epochs=1)
    for name in names:
        assert first[name] == second[name], name
        assert first[name] == pytest.approx(one.losses, abs=2e-6), name


class Builder(ZeroBubbleVPipelineProgramBuilder):
    """A builder of the user's own."""


def losses_of_own_builder() -> list[float]:
    return fit(D9DStrategy(schedule=Builder(), num_microbatches=4), devices=2, max_epochs=1)[2].losses


def test_a_builder_of_ones_own_trains():
    """``D9DStrategy(schedule=MyBuilder())`` runs what the builder composes."""
    _, _, one = fit("auto", max_epochs=1)
    for losses in run_distributed(losses_of_own_builder, 2, init_group=False):
        assert losses == pytest.approx(one.losses, abs=2e-6)
