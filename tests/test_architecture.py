"""The layers stay layers: who may import whom, what may load torch, and how large a file may grow."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "d9d_lightning"
FILES = sorted(ROOT.rglob("*.py"))
MAX_LINES = 400

ALLOWED: dict[str, set[str]] = {
    "__init__": {"strategy"},
    "__main__": {"errors", "schedule", "values", "partition", "stage", "runtime", "strategy"},
    "errors": set(),
    "schedule": {"errors"},
    "values": {"errors"},
    "partition": {"errors", "values"},
    "stage": {"errors", "values", "partition", "schedule"},
    "gradients": {"errors", "values"},
    "runtime": {"errors", "values", "schedule", "partition", "stage"},
    "strategy": {"errors", "values", "schedule", "partition", "stage", "gradients", "runtime"},
    "testing": {"errors", "values", "schedule", "partition", "stage", "gradients", "runtime"},
}
"""For each layer, the layers it may import besides itself: the arrows of docs/architecture.md."""

DISTRIBUTED_LAYERS = {"runtime", "gradients", "strategy", "testing"}


def layer_of(path: Path) -> str:
    """Layer of a file of the package: its top-level folder or module."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports, inside functions and under TYPE_CHECKING too."""
    package = ["d9d_lightning", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_layer_has_its_row() -> None:
    """A new layer must say what it may import."""
    assert {layer_of(path) for path in FILES} <= ALLOWED.keys()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    """A layer imports only itself and the layers that stand below it."""
    layer = layer_of(path)
    used = {name.split(".")[1] for name in imported_modules(path) if name.startswith("d9d_lightning.")}
    assert used - ALLOWED[layer] - {layer, "__version__"} == set()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_the_strategy_knows_lightning(path: Path) -> None:
    """No other layer imports lightning."""
    used = {name for name in imported_modules(path) if name.split(".")[0] in ("lightning", "pytorch_lightning")}
    assert layer_of(path) == "strategy" or used == set()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_private_lightning_names_have_one_home(path: Path) -> None:
    """What Lightning does not promise to keep is imported in strategy/compat.py alone."""
    private = {
        name
        for name in imported_modules(path)
        if name.split(".")[0] == "lightning" and any(part.startswith("_") for part in name.split("."))
    }
    assert name_of(path) == "strategy/compat.py" or private == set()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_some_layers_know_process_groups(path: Path) -> None:
    """partition/ and stage/ compute on one device; torch.distributed belongs to the layers above and to gradients/."""
    used = {name for name in imported_modules(path) if name.startswith("torch.distributed")}
    attributes = {
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed")
    }
    assert layer_of(path) in DISTRIBUTED_LAYERS or used | attributes == set()


@pytest.mark.parametrize("path", [path for path in FILES if layer_of(path) in ("schedule", "errors")], ids=name_of)
def test_schedules_need_the_standard_library_only(path: Path) -> None:
    """A schedule can be read, printed and checked where torch is not installed."""
    outside = {
        name.split(".")[0]
        for name in imported_modules(path)
        if name.split(".")[0] not in (sys.stdlib_module_names | {"d9d_lightning"})
    }
    assert outside == set()


@pytest.mark.parametrize("module", ["d9d_lightning", "d9d_lightning.schedule", "d9d_lightning.errors"])
def test_light_imports_load_no_torch(module: str) -> None:
    """Tools that only look at schedules do not wait for torch and lightning."""
    code = f"import sys, {module}; print(sorted({{'torch', 'lightning', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_stay_readable(path: Path) -> None:
    """No file grows beyond what one reads in one go."""
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_error_says_something(path: Path) -> None:
    """Every exception is raised with a message, and none by assert."""
    silent = [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert) or (isinstance(node, ast.Raise) and _is_silent(node))
    ]
    assert silent == []


def _is_silent(node: ast.Raise) -> bool:
    error = node.exc
    if error is None:
        return False
    if isinstance(error, ast.Call):
        name = ast.unparse(error.func)
        has_text = any(not (isinstance(arg, ast.Constant) and arg.value in ("", None)) for arg in error.args)
        return name.endswith(("Error", "Exception")) and not has_text and not error.keywords
    return isinstance(error, ast.Name) and error.id.endswith("Error") and error.id in dir(__builtins__)
