"""How processes are started: as scripts, by ``spawn`` or ``fork``, or by somebody else (torchrun, SLURM)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import ParallelStrategy

from d9d_lightning.strategy.compat import (
    Launcher,
    MultiProcessingLauncher,
    SubprocessScriptLauncher,
    set_num_threads_if_needed,
)

__all__ = ["ScriptLauncher", "WholeModuleLauncher", "make_launcher"]

POLL_SECONDS = 0.5


class ScriptLauncher(SubprocessScriptLauncher):
    """Runs the script again for every further process.

    Lightning's observer kills everything five seconds after a child has failed, perhaps before anybody has said why.
    Once the processes are connected the failure watch does better; until then children are watched here.

    Args:
        environment: Who is who.
        num_processes: On this node.
        num_nodes: Number of nodes.
        connected: Whether the failure watch runs.
    """

    def __init__(
        self,
        environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        connected: Callable[[], bool],
    ) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._connected = connected

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other processes, then call the function here too."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            threading.Thread(
                target=_watch_children, args=(self.procs, self._connected), name="d9d-children", daemon=True
            ).start()
        set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


def _watch_children(children: Sequence[subprocess.Popen[Any]], connected: Callable[[], bool]) -> None:
    """End everything when a child fails before it could join; afterwards only collect exit codes."""
    nap = threading.Event()
    while any(child.poll() is None for child in children):
        nap.wait(POLL_SECONDS)
        failed = [index for index, child in enumerate(children, start=1) if child.poll()]
        if failed and not connected():
            codes = ", ".join(f"local rank {index}: exit code {children[index - 1].returncode}" for index in failed)
            sys.stderr.write(
                f"D9DStrategy: a process ended before all were connected ({codes}); its own message is above. "
                "The others end too.\n"
            )
            sys.stderr.flush()
            for child in children:
                if child.poll() is None:
                    child.send_signal(signal.SIGTERM)
            os._exit(1)


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
    connected: Callable[[], bool],
) -> Launcher | None:
    """Launcher for a strategy; None where one process runs alone, so that nothing is left in its environment."""
    if num_processes * num_nodes == 1 and not environment.creates_processes_externally:
        return None
    if start_method == "popen" or environment.creates_processes_externally:
        return ScriptLauncher(environment, num_processes, num_nodes, connected)
    return WholeModuleLauncher(strategy, start_method, whole)
