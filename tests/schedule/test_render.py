"""Pictures, tables and the command."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from d9d_lightning.schedule import SCHEDULES, Costs, build_program, simulate
from d9d_lightning.schedule.__main__ import main
from d9d_lightning.schedule.compare import compare_schedules
from d9d_lightning.schedule.render import draw_compact, draw_text


def test_text_timeline() -> None:
    """A row per rank, a column per tick, a letter and a number per action."""
    run = simulate(build_program("zb_h1", pp_size=2, num_microbatches=2))
    assert draw_text(run) == "0| F0 F1 .  I0 W0 I1 W1\n1| .  F0 I0 F1 I1 W0 W1\n"


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_docstrings_show_what_the_family_does(name: str) -> None:
    """The timeline in the documentation of each family is the one that it builds, with a paper or a reason beside."""
    text = inspect.getdoc(SCHEDULES[name]) or ""
    drawn = draw_compact(simulate(build_program(name, pp_size=4, num_microbatches=8)))
    block = "".join(f"    {line}".rstrip() + "\n" for line in drawn.splitlines())
    assert block in text
    assert "Bubble" in text or "bubble" in text


def test_the_command_draws_and_writes_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints the timeline with bubble and memory, and writes well-formed SVG and HTML with a legend."""
    svg, page = tmp_path / "zbv.svg", tmp_path / "zbv.html"
    assert main(["zbv", "--ranks", "2", "--microbatches", "4", "--svg", str(svg), "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "0| F0 F1 F2 f0" in printed
    assert "bubble" in printed
    assert "peak (stage activations)" in printed
    root = ElementTree.fromstring(svg.read_text())
    labels = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"F forward", "I input gradient", "W weight gradient", "rank 1"} <= labels
    assert len(list(root.iter("{http://www.w3.org/2000/svg}title"))) == 2 * 2 * 4 * 3
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_the_command_takes_costs(capsys: pytest.CaptureFixture[str]) -> None:
    """Costs given on the command line are those of the run."""
    assert main(["gpipe", "--ranks", "2", "--microbatches", "1", "--costs", "1,2,3,0.5"]) == 0
    assert "span 13 " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["gpipe", "--costs", "1,2"])
    assert "expected F,I,W or F,I,W,C" in capsys.readouterr().err


def test_the_command_explains_a_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong name or wrong numbers end with status 2 and the error of the library."""
    assert main(["zvb"]) == 2
    assert "the names are gpipe" in capsys.readouterr().err
    assert main(["dualpipev", "--ranks", "4", "--microbatches", "7"]) == 2
    assert "num_microbatches=7" in capsys.readouterr().err
    assert main(["gpipe", "--costs", "0,0,0"]) == 2
    assert "nothing to draw" in capsys.readouterr().err
    assert main([]) == 2
    assert "--compare" in capsys.readouterr().err


def test_compare_says_which_to_take(capsys: pytest.CaptureFixture[str]) -> None:
    """The table has every training schedule, marks those over the limit, and names the fastest that fits."""
    assert main(["--compare", "--ranks", "2", "--microbatches", "4", "--max-activations", "2", "--no-barrier"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in SCHEDULES:
        if name != "forward_only":
            assert any(line.startswith(name) for line in lines)
    assert "too much memory" in next(line for line in lines if line.startswith("gpipe"))
    assert lines[-1].startswith("take: zbv (12 without a barrier")


def test_compare_prefers_the_fastest_that_fits() -> None:
    """The recommended schedule fits and nothing that fits is faster."""
    comparison = compare_schedules(
        pp_size=2, num_microbatches=3, costs=Costs(1, 1.2, 0.6, 0.1), max_activations=1.5, barrier=True
    )
    best = comparison.best
    assert best.fits
    fitting = [row for row in comparison.rows if row.fits and row.simulation is not None]
    assert comparison.time(best) == min(map(comparison.time, fitting))
    refused = [row for row in comparison.rows if row.simulation is None]
    assert {row.label for row in refused} == {"zb_h2", "dualpipev", "zb1p", "interleaved_1f1b"} - {
        row.label for row in comparison.rows if row.simulation is not None
    }


def test_importing_schedules_loads_the_standard_library_only() -> None:
    """The package and its command load no torch, lightning or any other package from outside."""
    code = (
        "import sys, d9d_lightning.schedule, d9d_lightning.schedule.__main__, d9d_lightning.testing.schedules\n"
        "roots = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(r for r in roots - set(sys.stdlib_module_names) if not r.startswith('_')))"
    )
    out = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd=_root())
    assert out.stdout.strip() == "['d9d_lightning']"


def _root() -> Path:
    return Path(__file__).resolve().parents[2]
