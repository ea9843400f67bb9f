"""Every example runs as a user would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Output and folder of the main job with its comparison; two processes and one device, in a fresh interpreter."""
    folder = tmp_path_factory.mktemp("digits")
    command = [sys.executable, str(EXAMPLES / "digits_vit.py"), "--compare", "--folder", str(folder)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280, env={**os.environ}, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout, folder


def number_after(text: str, output: str) -> float:
    """The last number that the output gives behind a text."""
    return float(re.findall(rf"{re.escape(text)}[^:]*: ([0-9.e+-]+)", output)[-1])


def test_main_job_learns_the_digits(digits_run: tuple[str, Path]) -> None:
    """The pipeline of two processes reaches a validation accuracy of at least 0.9, and shows a progress bar."""
    output, _ = digits_run
    accuracies = re.findall(r"validation accuracy: ([0-9.]+)", output)
    assert len(accuracies) == 2
    assert float(accuracies[1]) >= 0.9
    assert "Epoch 11/11" in output


def test_main_job_equals_one_device(digits_run: tuple[str, Path]) -> None:
    """Over all steps the losses and weights stay within what rounding does to a run of that length."""
    output, _ = digits_run
    assert number_after("largest difference of loss", output) < LOSS_BOUND
    assert number_after("largest difference of a parameter", output) < PARAMETER_BOUND
    assert number_after("difference of the validation accuracy", output) <= 0.01


def test_checkpoint_of_the_pipeline_loads_into_the_plain_module(digits_run: tuple[str, Path]) -> None:
    """The file has the module's own names, and the module loads it without this package."""
    _, folder = digits_run
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from vit_module import DigitsClassifier;"
        "DigitsClassifier.load_from_checkpoint(sys.argv[2], weights_only=True, strict=True);"
        "print('d9d_lightning' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(EXAMPLES), str(folder / "pipeline" / "final.ckpt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "False", done.stderr[-4000:]


# Rounding differences grow over 276 steps of Adam; a wrong gradient in any step is orders of magnitude above this.
LOSS_BOUND = 5e-2
PARAMETER_BOUND = 5e-2
