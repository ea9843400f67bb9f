"""Names in Lightning's registry, in either import order, without loading torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

ORDERS = {
    "ours first": "import d9d_lightning; import lightning as L",
    "lightning first": "import lightning as L; import d9d_lightning",
}


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_names_work_in_either_import_order(order):
    """``Trainer(strategy="d9d_zbv")`` makes the strategy with that schedule, whichever package came first."""
    make = "trainer = L.Trainer(strategy='d9d_1f1b', accelerator='cpu', logger=False)"
    code = f"{order}\n{make}\nprint(trainer.strategy.options.schedule)"
    assert run(code) == "1f1b"


def test_importing_the_package_loads_neither_torch_nor_lightning():
    """A tool that only looks at schedules pays for neither."""
    code = "import sys, d9d_lightning\nprint([m for m in ('torch', 'lightning', 'numpy') if m in sys.modules])"
    assert run(code) == "[]"


def test_every_schedule_has_a_name():
    """The registry holds one name for each schedule that can train, and a second import changes nothing."""
    from lightning.pytorch.strategies import StrategyRegistry

    from d9d_lightning.strategy import registry
    from d9d_lightning.strategy.programs import schedule_names

    registry.install()
    names = {name for name in StrategyRegistry if name.startswith("d9d_")}
    assert names == {f"d9d_{schedule}" for schedule in schedule_names()}
