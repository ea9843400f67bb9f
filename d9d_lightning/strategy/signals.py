"""What asks a job to stop: noted where it arrives, acted upon by all ranks at the same batch.

Lightning broadcasts from within the handler of SIGTERM, and looks at a flag of the own rank after each batch. With a
pipeline the first collides with messages under way, and the second stops one rank while the others wait for it. Here a
handler only writes an attribute. Before each batch the ranks compare, and all of them stop or none.

``trainer.should_stop = True`` on one rank is such a wish too: hooks see what their own rank has, and the ranks of a
pipeline are one device to the user. So it is shared right after the hooks that may have written it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed import ProcessGroup

from d9d_lightning.runtime.groups import maximum_over

__all__ = ["EXIT_CODE", "StopSignals"]

EXIT_CODE = 128 + signal.SIGTERM
"""How shells report a process that SIGTERM ended; a plain ``SystemExit`` would say that all went well."""


class StopSignals:
    """Puts the handling of stop signals of one run on the trainer, and takes it away afterwards.

    Args:
        trainer: The trainer.
        group: A gloo group of all processes; None where one process is alone, which Lightning handles well.
    """

    def __init__(self, trainer: Trainer, group: ProcessGroup | None) -> None:
        self._trainer: Any = trainer
        self._group = group
        self._stop = False
        self._requeue = False
        self._installed: list[tuple[Any, str]] = []

    def install(self) -> None:
        """Take over; before the trainer registers its handlers."""
        if self._group is None:
            return
        connector = self._trainer._signal_connector
        self._bind(connector, "_sigterm_notifier_fn", self._note_stop)
        self._bind(connector, "_slurm_sigusr_handler_fn", self._note_requeue)
        self._bind(self._trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", self.agree)
        for owner, name in (
            (self._trainer._logger_connector, "update_train_step_metrics"),
            (self._trainer._logger_connector, "update_train_epoch_metrics"),
            (self._trainer.strategy, "on_validation_end"),
        ):
            self._bind(owner, name, self._share_wish_after(getattr(owner, name)))

    def remove(self) -> None:
        """Give the trainer its own handling back."""
        for owner, name in self._installed:
            vars(owner).pop(name, None)
        self._installed.clear()

    def agree(self) -> None:
        """Compare with the other ranks; collective, before each batch.

        Raises:
            SIGTERMException: On every rank, if SIGTERM has reached any of them.
        """
        if self._group is None:
            return
        stop, requeue = maximum_over([self._stop, self._requeue], self._group)
        connector = self._trainer._signal_connector
        if requeue:
            self._requeue = False
            # The class's own one: it saves a checkpoint, which is collective, and asks SLURM to start the job again.
            type(connector)._slurm_sigusr_handler_fn(connector, signal.SIGUSR1, None)
        if stop:
            connector.received_sigterm = True
            raise SIGTERMException(EXIT_CODE)

    def _share_wish_after(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What Lightning calls on all ranks once their hooks have run, followed by :meth:`_share_wish`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._share_wish()
            return result

        return call

    def _share_wish(self) -> None:
        if self._trainer.sanity_checking or self._group is None:
            return
        (wish,) = maximum_over([bool(self._trainer.should_stop)], self._group)
        self._trainer.should_stop = bool(wish)

    def _note_stop(self, signum: int, frame: Any) -> None:
        launcher = self._trainer.strategy.launcher
        if not self._stop and launcher is not None:
            launcher.kill(signum)
        self._stop = True

    def _note_requeue(self, signum: int, frame: Any) -> None:
        self._requeue = True

    def _bind(self, owner: Any, name: str, method: Any) -> None:
        setattr(owner, name, method)
        self._installed.append((owner, name))
