"""Every example runs as a user would run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 580
ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
# One device against itself, with each batch computed in four parts, differs by 9.5e-7 over the first 50 steps, and in
# the end by 7.0e-3 (losses) and 2.2e-3 (parameters): rounding, which 240 steps of Adam let grow.
EARLY_LOSS_BOUND = 1e-5
LOSS_BOUND = 5e-2
PARAMETER_BOUND = 2e-2
# bf16 rounds to three digits, and a microbatch is summed in another order than a batch.
BF16_LOSS_BOUND = 5e-2


def run_python(folder: Path, *arguments: str) -> str:
    """Output of a fresh interpreter in a folder of its own, which must end well."""
    done = subprocess.run(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Output and folder of the main job with its comparison; two processes and one device, in a fresh interpreter."""
    folder = tmp_path_factory.mktemp("digits")
    return run_python(folder, str(EXAMPLES / "digits_vit.py"), "--compare", "--folder", str(folder)), folder


def number_after(text: str, output: str) -> float:
    """The last number that the output gives behind a text."""
    return float(re.findall(rf"{re.escape(text)}[^:]*: ([0-9]+[0-9.e+-]*)", output)[-1])


def test_main_job_learns_the_digits(digits_run: tuple[str, Path]) -> None:
    """The pipeline of two processes reaches a validation accuracy of at least 0.9, and shows a progress bar."""
    output, _ = digits_run
    accuracies = re.findall(r"^validation accuracy: ([0-9.]+)", output, re.MULTILINE)
    assert len(accuracies) == 2, output[-2000:]
    assert float(accuracies[1]) >= 0.9
    assert "Epoch 7/7" in output


def test_main_job_equals_one_device(digits_run: tuple[str, Path]) -> None:
    """Over all steps the losses and weights stay within what rounding does to a run of that length."""
    output, _ = digits_run
    assert number_after("largest difference of loss over the first 50 steps", output) < EARLY_LOSS_BOUND
    assert number_after("largest difference of loss over all", output) < LOSS_BOUND
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
    output = run_python(folder, "-c", code, str(EXAMPLES), str(folder / "pipeline" / "final.ckpt"))
    assert output.splitlines()[-1] == "False"


def test_first_example_of_the_documentation_runs(tmp_path: Path) -> None:
    """The program on the first page can be pasted into a file and trains on two processes."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), re.DOTALL)
    assert block is not None
    script = tmp_path / "first.py"
    script.write_text(block[1])
    assert "`max_epochs=1` reached" in run_python(tmp_path, str(script))


def test_tied_gpt_changes_its_pipeline_size_and_writes(tmp_path: Path) -> None:
    """A run that goes on at another pipeline size is the run without a break, and all ranks write one text."""
    smoke = ("--compare", "--epochs", "2", "--batches", "4", "--length", "12", "--folder", str(tmp_path))
    output = run_python(tmp_path, str(EXAMPLES / "gpt_kjv.py"), *smoke)
    start, end = number_after("one device, 2 steps", output), number_after("pipeline, 4 steps", output)
    assert number_after("the same weights through 2 processes", output) == pytest.approx(start, abs=2e-3)
    assert number_after("one device, 4 steps", output) == pytest.approx(end, abs=2e-3)
    assert end < start
    assert number_after("largest difference of loss over all 8 batches", output) < 2e-3
    assert "\nAnd the LORD said unto " in output
    assert "equal to what one process writes with the whole module: True" in output
    assert "embedding and head are one tensor in the final file: True" in output


@pytest.mark.full
@pytest.mark.timeout(600)
def test_tied_gpt_learns_english_across_a_change_of_size(tmp_path: Path) -> None:
    """The two halves follow the run without a break, and end below what pairs of letters tell (3.3 bits)."""
    output = run_python(tmp_path, str(EXAMPLES / "gpt_kjv.py"), "--compare", "--folder", str(tmp_path))
    assert number_after("pipeline, 400 steps", output) < 3.2
    assert number_after("largest difference of loss in the 10 batches after it", output) < BF16_LOSS_BOUND


def test_pretrained_model_is_fine_tuned(tmp_path: Path) -> None:
    """Every layer of the pretrained model is trained by two processes; the frozen embeddings keep every bit."""
    script = str(EXAMPLES / "minilm_finetune.py")
    output = run_python(tmp_path, script, "--verses", "48", "--val-verses", "32", "--folder", str(tmp_path))
    assert "embeddings kept their pretrained values: True" in output
    assert "layers that were trained: 0, 1, 2, 3, 4, 5" in output
    assert number_after("validation accuracy", output) > 0.5


@pytest.mark.full
@pytest.mark.timeout(600)
def test_pretrained_model_tells_the_testaments_apart(tmp_path: Path) -> None:
    """Fine-tuning beats the majority by far, with the accuracy of one device."""
    output = run_python(tmp_path, str(EXAMPLES / "minilm_finetune.py"), "--compare", "--folder", str(tmp_path))
    found = re.findall(r"^validation accuracy: ([0-9.]+), that of the majority: ([0-9.]+)", output, re.MULTILINE)
    assert len(found) == 2, output[-2000:]
    accuracy, majority = map(float, found[1])
    assert accuracy > majority + 0.05
    assert number_after("difference of the validation accuracy", output) <= 0.02
