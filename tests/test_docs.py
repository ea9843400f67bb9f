"""The pages of the documentation say what is so: their code runs, and nothing that they should name is missing."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import shlex
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from d9d_lightning import D9DStrategy
from d9d_lightning.schedule.__main__ import main as schedule_command

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = ("index.md", "migrating.md", "options.md", "reliability.md", "troubleshooting.md")
DOCTESTS = ("refused.md",)
# Tested beside the code that they are about: tests/runtime, tests/schedule, tests/test_public_names.py.
ELSEWHERE = ("batches.md", "from_d9d.md", "schedules.md")


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def python_blocks(text: str) -> list[str]:
    """What runs on a page, in order: Python blocks, and of a ``diff`` block the script that it leads to."""
    blocks = []
    for language, block in re.findall(r"^```(python|diff)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language == "diff":
            kept = [line[1:] for line in block.splitlines() if not line.startswith("-")]
            block = "\n".join(kept)
        blocks.append(block)
    return blocks


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_in_order(page: str) -> None:
    """Every Python block, and the new side of every comparison with another strategy, runs as it stands."""
    found: dict[str, object] = {"__name__": "docs"}
    blocks = python_blocks(read(page))
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), found)


@pytest.mark.parametrize("page", DOCTESTS)
def test_the_sessions_of_a_page_give_what_is_printed_there(page: str) -> None:
    """Every interactive example gives its output, errors included."""
    result = doctest.testfile(str(DOCS / page), module_relative=False)
    assert result.attempted >= 10
    assert result.failed == 0


def test_the_printed_output_of_a_command_is_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Where a page shows a command of ``d9d_lightning.schedule`` with its output, the command gives that output."""
    block = r"```bash\npython -m d9d_lightning\.schedule ([^\n]*)\n```\n\n```text\n(.*?)```"
    shown = re.findall(block, _all_pages(), re.DOTALL)
    assert shown
    for arguments, output in shown:
        assert schedule_command(shlex.split(arguments)) == 0
        assert _without_padding(capsys.readouterr().out) == _without_padding(output)


def _all_pages() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md")))


def _without_padding(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def test_no_page_with_code_is_left_out() -> None:
    """A page with Python on it is executed by some test."""
    with_code = {page.name for page in DOCS.glob("*.md") if python_blocks(page.read_text(encoding="utf-8"))}
    assert with_code == {*PAGES, *DOCTESTS, *ELSEWHERE}


def test_every_option_has_its_place() -> None:
    """The page on options has one heading for each argument of the strategy, and none for what is no argument."""
    described = set(re.findall(r"^### `([a-z]\w*)`", read("options.md"), re.MULTILINE))
    assert described == set(inspect.signature(D9DStrategy).parameters)


def test_the_defaults_on_the_page_of_options_are_those_of_the_code() -> None:
    """Under each argument the page begins with its default, as the signature has it; timeout's is torch's own."""
    begins = dict(re.findall(r"^### `([a-z]\w*)`\n+Default `([^`]+)`", read("options.md"), re.MULTILINE))
    parameters = inspect.signature(D9DStrategy).parameters
    assert begins.keys() == parameters.keys() - {"timeout"}
    assert {name: ast.literal_eval(default) for name, default in begins.items()} == {
        name: parameters[name].default for name in begins
    }
    assert parameters["timeout"].default == timedelta(minutes=30)


def test_links_between_pages_lead_somewhere() -> None:
    """Each relative link and picture of the documentation and the README exists."""
    missing = []
    for page in [*DOCS.glob("*.md"), ROOT / "README.md"]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                missing.append(f"{page.name}: {target}")
    assert missing == []


def test_every_page_is_in_the_site() -> None:
    """The navigation of the site has all pages and no others."""
    configuration = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = [page for entry in configuration["nav"] for page in _pages_of(entry)]
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))


def _pages_of(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    if isinstance(entry, dict):
        return [page for value in entry.values() for page in _pages_of(value)]
    if isinstance(entry, list):
        return [page for item in entry for page in _pages_of(item)]
    return []


def test_the_site_is_built(tmp_path: Path) -> None:
    """The documentation builds as a site without a warning."""
    build = pytest.importorskip("mkdocs.commands.build")
    from mkdocs.config import load_config

    configuration = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site"), strict=True)
    build.build(configuration)
    assert "How it works" in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
