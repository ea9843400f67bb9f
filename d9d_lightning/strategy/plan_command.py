"""``python -m d9d_lightning plan``: ``D9DStrategy.explain`` from the command line."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import LightningDataModule
from torch import nn
from torch.utils.data import DataLoader

from d9d_lightning.errors import PartitionError, PipelineConfigurationError, ScheduleError
from d9d_lightning.strategy.compat import is_overridden
from d9d_lightning.strategy.named import find_named
from d9d_lightning.strategy.programs import schedule_names
from d9d_lightning.strategy.strategy import D9DStrategy

__all__ = ["main"]

LOADER_OF = {
    "training_step": ("fit", "train_dataloader"),
    "validation_step": ("validate", "val_dataloader"),
    "test_step": ("test", "test_dataloader"),
    "predict_step": ("predict", "predict_dataloader"),
}


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Returns:
        Exit status: 0, or 2 where the module cannot be found or cut.
    """
    options = _parser().parse_args(arguments)
    try:
        sys.stdout.write(_plan(options) + "\n")
    except (PipelineConfigurationError, PartitionError, ScheduleError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m d9d_lightning plan",
        description="Show how a LightningModule would be cut into stages (units, parameters, operations, what crosses "
        "boundaries) and what each schedule would take (bubble, memory of each rank). No process is started.",
        epilog="example: python -m d9d_lightning plan my_model.py:Model --batch my_model.py:make_batch --ranks 4 "
        "--schedules zbv,1f1b --microbatches 8 --picture plan.png",
    )
    parser.add_argument("module", help="class or function that gives the module: package.module:Name or file.py:Name")
    parser.add_argument("--arguments", type=_parse_json, default={}, metavar="JSON", help="such as '{\"hidden\": 512}'")
    parser.add_argument(
        "--batch",
        metavar="NAME",
        default=None,
        help="a batch, a DataLoader, a LightningDataModule, or a function or class that gives one; by default the "
        "module's own dataloader",
    )
    parser.add_argument("--ranks", type=int, default=2, help="pipeline size (2)")
    parser.add_argument(
        "--schedules",
        default="zbv",
        metavar="NAMES",
        help=f"the schedule to show, then others to compare, or all ({', '.join(schedule_names())})",
    )
    parser.add_argument("--microbatches", type=_parse_count, default="auto", help='a number, or "auto" (auto)')
    parser.add_argument("--step", choices=sorted(LOADER_OF), default="training_step", help="(training_step)")
    parser.add_argument("--units", default=None, metavar="PATTERNS", help="D9DStrategy(units=...), separated by commas")
    parser.add_argument("--split-points", default=None, metavar="NAMES", help="D9DStrategy(split_points=...)")
    parser.add_argument("--picture", default=None, metavar="FILE", help="timeline as .png, .svg or .html")
    return parser


def _parse_json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f'{text!r}: expected an object, such as {{"hidden": 512}}')
    return found


def _parse_count(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _plan(options: argparse.Namespace) -> str:
    wanted = options.schedules.split(",")
    names = list(schedule_names()) if wanted == ["all"] else wanted
    if options.ranks < 1:
        raise PipelineConfigurationError(f"--ranks {options.ranks}: a pipeline has at least 1 rank")
    strategy = D9DStrategy(
        schedule="zbv" if wanted == ["all"] else names[0],
        num_microbatches=options.microbatches,
        units=_names(options.units),
        split_points=_names(options.split_points),
    )
    module = _make(find_named(options.module, "module"), options.arguments)
    if not isinstance(module, nn.Module):
        raise PipelineConfigurationError(
            f"module {options.module!r} gives a {type(module).__name__}; name a LightningModule class, or a function "
            "that returns one"
        )
    batch = _find_batch(options, module)
    return strategy.explain(
        module, batch, ranks=options.ranks, step=options.step, schedules=names, picture=options.picture
    )


def _names(text: str | None) -> list[str] | None:
    return None if text is None else text.split(",")


def _make(found: Any, arguments: dict[str, Any]) -> Any:
    is_factory = inspect.isclass(found) or inspect.isroutine(found)
    if not is_factory:
        return found
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as error:
        raise PipelineConfigurationError(
            f"{found.__name__} cannot be called with {arguments}: {error}. Give its arguments with "
            "--arguments '{\"name\": value}', or name a function that needs none"
        ) from error
    return found(**arguments)


def _find_batch(options: argparse.Namespace, module: nn.Module) -> Any:
    stage, loader_name = LOADER_OF[options.step]
    if options.batch is None:
        if not is_overridden(loader_name, module):
            raise PipelineConfigurationError(
                f"{type(module).__name__} has no {loader_name}, so there is no batch to plan with. Type --batch "
                "package.module:name of a batch, a DataLoader, a LightningDataModule or a function that gives one"
            )
        return _first(getattr(module, loader_name))
    source = _make(find_named(options.batch, "batch"), {})
    if isinstance(source, LightningDataModule):
        source.prepare_data()
        source.setup(stage)
        source = getattr(source, loader_name)()
    return next(iter(source)) if isinstance(source, DataLoader) else source


def _first(make_loader: Callable[[], Any]) -> Any:
    return next(iter(make_loader()))
