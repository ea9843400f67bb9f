"""``python -m d9d_lightning plan`` and ``D9DStrategy.explain``: what a run would be, before any process starts."""

from __future__ import annotations

import struct
import xml.etree.ElementTree as ElementTree
import zlib
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from d9d_lightning import D9DStrategy
from d9d_lightning.__main__ import main
from d9d_lightning.schedule import Costs, build_program, simulate
from d9d_lightning.strategy.explain import look_ahead
from d9d_lightning.strategy.outlook import Outlook, show_bytes
from d9d_lightning.strategy.programs import schedule_names

HERE = "tests.strategy.test_plan_command"
WIDTH = 8


class Net(L.LightningModule):
    """Six equal layers; every figure of the plan can be worked out by hand."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(6))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = batch
        for layer in self.layers:
            hidden = layer(hidden)
        self.log("loss", hidden.sum())
        return hidden.sum()


class WithLoader(Net):
    """Has a loader of its own."""

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(12, WIDTH), batch_size=6)


class Data(L.LightningDataModule):
    """A data module that must be set up first."""

    def setup(self, stage: str) -> None:
        self.samples = torch.ones(12, WIDTH)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.samples, batch_size=6)


def batch() -> torch.Tensor:
    return torch.ones(6, WIDTH)


def loader() -> Any:
    return torch.utils.data.DataLoader(torch.ones(12, WIDTH), batch_size=6)


def look(**options: Any) -> Outlook:
    strategy = D9DStrategy(**{"schedule": "1f1b", "num_microbatches": 3, **options})
    return look_ahead(strategy.options, Net(), batch(), 2, "training_step")


def test_figures_of_a_stage_are_those_of_its_layers() -> None:
    """Parameters, operations, kept and sent bytes of a stage equal what its linear layers have by hand."""
    first, second = look().stages
    assert first.units == ("layers.0", "layers.1", "layers.2") and second.units[-1] == "layers.5"
    rows = 2
    for stage in (first, second):
        assert stage.parameters == 3 * WIDTH * WIDTH and stage.parameter_bytes == 4 * stage.parameters
        assert stage.flops == 3 * 2 * rows * WIDTH * WIDTH
        assert stage.activation_bytes == 3 * rows * WIDTH * 4
    assert first.sent_bytes == rows * WIDTH * 4 and second.sent_bytes == 0


def test_every_schedule_has_its_bubble_and_memory() -> None:
    """The table names all schedules; bubble and memory of each rank are those of its simulated program."""
    outlook = look()
    assert [row.name for row in outlook.schedules] == ["1f1b", *(n for n in schedule_names() if n != "1f1b")]
    row = next(row for row in outlook.schedules if row.name == "gpipe")
    kept = 3 * 2 * WIDTH * 4
    run = simulate(build_program("gpipe", pp_size=2, num_microbatches=3), Costs(1, 1, 1, activation=kept))
    assert row.simulation is not None and row.simulation.bubble_rate == pytest.approx(run.bubble_rate)
    assert row.rank_bytes == tuple(2 * 3 * WIDTH * WIDTH * 4 + round(peak) for peak in run.peak_activations)
    refused = next(row for row in outlook.schedules if row.name == "dualpipev")
    assert refused.simulation is None and refused.problem in outlook.text()


def test_memory_of_a_checkpointed_layer_is_what_stays() -> None:
    """Of an activation-checkpointed region its arguments are counted, not what it keeps inside."""

    class Checkpointed(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            hidden = batch
            for layer in self.layers:
                hidden = torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=False)
            return hidden.sum()

    options = D9DStrategy(schedule="1f1b", num_microbatches=3).options
    outlook = look_ahead(options, Checkpointed(), batch(), 2, "training_step", [])
    assert [stage.activation_bytes for stage in outlook.stages] == [2 * 64, 3 * 64]


@pytest.mark.parametrize("source", ["batch", "loader", "Data"])
def test_the_command_takes_a_batch_a_loader_or_a_data_module(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever gives the batch, the command prints what ``explain`` says of it."""
    command = f"plan {HERE}:Net --batch {HERE}:{source} --ranks 2 --schedules 1f1b,zbv --microbatches 3"
    assert main(command.split()) == 0
    expected = D9DStrategy(schedule="1f1b", num_microbatches=3).explain(Net(), batch(), ranks=2, schedules=["zbv"])
    assert capsys.readouterr().out == expected + "\n"
    assert not torch.distributed.is_initialized()


def test_the_command_finds_files_arguments_and_the_modules_own_loader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file is taken by its path, arguments come as JSON, and without ``--batch`` the module's loader is asked."""
    (tmp_path / "mine.py").write_text(f"from {HERE} import WithLoader\ndef build(width): return WithLoader(width)\n")
    command = ["plan", f"{tmp_path}/mine.py:build", "--arguments", '{"width": 8}', "--schedules", "1f1b"]
    assert main([*command, "--picture", f"{tmp_path}/out/plan.html"]) == 0
    assert capsys.readouterr().out.startswith("stage 0 on rank 0: layers.0, layers.1, layers.2; 192 parameters (768 B)")
    assert "1f1b: 2 ranks" in (tmp_path / "out" / "plan.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (f"{HERE}:Missing --batch {HERE}:batch", "has no 'Missing'"),
        (f"no_such_package.models:Net --batch {HERE}:batch", "there is no module 'no_such_package.models'"),
        (f"nowhere.py:Net --batch {HERE}:batch", "there is no file 'nowhere.py'"),
        (f"Net --batch {HERE}:batch", "package.module:name"),
        (f"{HERE}:Net", "has no train_dataloader"),
        (f"{HERE}:batch --batch {HERE}:batch", "gives a Tensor"),
        (f"{HERE}:Net --batch {HERE}:batch --schedules zvb", "no schedule has this name"),
        (f"{HERE}:Net --batch {HERE}:batch --schedules zbv,zvb", "no schedule is called 'zvb'"),
        (f"{HERE}:Net --batch {HERE}:batch --ranks 0", "at least 1 rank"),
        (f"{HERE}:Net --batch {HERE}:batch --microbatches few", "num_microbatches='few'"),
        (f"{HERE}:Net --batch {HERE}:batch --picture plan.gif", ".png, .svg or .html"),
        (f'{HERE}:Net --batch {HERE}:batch --arguments {{"depth":3}}', "cannot be called with {'depth': 3}"),
    ],
)
def test_a_wrong_command_says_what_to_type(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, and one line that names what was given and what is expected."""
    assert main(["plan", *arguments.split(" ")]) == 2
    assert message in capsys.readouterr().err


def test_the_command_line_without_a_command_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing, or an unknown command, shows which there are; ``schedule`` is one of them."""
    assert main([]) == 2 and "plan " in capsys.readouterr().err
    assert main(["--help"]) == 0 and "schedule" in capsys.readouterr().out
    assert main(["schedule", "gpipe", "--ranks", "2", "--microbatches", "2"]) == 0
    assert "gpipe: 2 ranks" in capsys.readouterr().out


def decode(path: Path) -> tuple[int, int, bytes]:
    """Width, height and pixels of a PNG with rows that are not filtered."""
    content = path.read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    size = struct.unpack(">I", content[33:37])[0]
    rows = zlib.decompress(content[41 : 41 + size])
    stride = 3 * width + 1
    assert len(rows) == stride * height and not any(rows[::stride])
    return width, height, b"".join(rows[at * stride + 1 : (at + 1) * stride] for at in range(height))


def test_the_png_shows_what_the_svg_shows(tmp_path: Path) -> None:
    """The middle of every box of the SVG has the colour of that box in the PNG, wherever no letter stands on it."""
    D9DStrategy(schedule="1f1b", num_microbatches=3).explain(
        Net(), batch(), ranks=2, schedules=[], picture=tmp_path / "a.svg"
    )
    D9DStrategy(schedule="1f1b", num_microbatches=3).explain(
        Net(), batch(), ranks=2, schedules=[], picture=tmp_path / "a.png"
    )
    width, height, pixels = decode(tmp_path / "a.png")
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert (width, height) == (int(root.get("width", 0)), int(root.get("height", 0)))
    boxes = [box for box in root.iter() if box.tag.endswith("rect") and box.find("{*}title") is not None]
    assert len(boxes) == 2 * 2 * 3
    for box in boxes:
        at = 3 * (width * (round(float(box.get("y", 0))) + 3) + round(float(box.get("x", 0))) + 4)
        assert pixels[at : at + 3].hex() == box.get("fill", "").lstrip("#")
    assert len({pixels[at : at + 3] for at in range(0, len(pixels), 3)}) >= 4


def test_sizes_are_shown_in_the_unit_that_suits() -> None:
    """Bytes, kilobytes, megabytes and gigabytes, three figures each."""
    shown = [show_bytes(size) for size in (0, 1023, 1536, 3 * 2**20, 5 * 2**30)]
    assert shown == ["0 B", "1023 B", "1.5 KB", "3 MB", "5 GB"]
