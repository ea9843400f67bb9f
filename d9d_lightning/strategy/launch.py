"""How processes are started: as scripts, by ``spawn`` or ``fork``, or by somebody else (torchrun, SLURM)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import ParallelStrategy

from d9d_lightning.strategy.compat import Launcher, MultiProcessingLauncher, SubprocessScriptLauncher

__all__ = ["WholeModuleLauncher", "make_launcher"]


class WholeModuleLauncher(MultiProcessingLauncher):
    """Starts processes that end with the run, and brings the whole module back, not the part of rank 0.

    Args:
        strategy: The strategy.
        start_method: ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        whole: Makes the module whole on every rank; collective.
    """

    def __init__(
        self, strategy: ParallelStrategy, start_method: Any, whole: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        super().__init__(strategy, start_method=start_method)
        self._whole = whole

    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        with self._whole():
            return super()._collect_rank_zero_results(trainer, results)


def make_launcher(
    strategy: ParallelStrategy,
    environment: ClusterEnvironment,
    *,
    num_processes: int,
    num_nodes: int,
    start_method: str,
    whole: Callable[[], AbstractContextManager[Any]],
) -> Launcher | None:
    """Launcher for a strategy; None where one process runs alone, so that nothing is left in its environment."""
    if num_processes * num_nodes == 1 and not environment.creates_processes_externally:
        return None
    if start_method == "popen" or environment.creates_processes_externally:
        return SubprocessScriptLauncher(environment, num_processes, num_nodes)
    return WholeModuleLauncher(strategy, start_method, whole)
