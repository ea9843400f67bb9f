"""Hooks of the user's module run on every rank, but what they log is what the loss owner logged.

A hook may log values that only the loss owner has right (what a step left behind, a norm of its own gradients). So
each overridden hook that is allowed to log is wrapped on the instance: logs are captured, the owner's are sent to the
others and replayed. Hooks named in ``owner_only_hooks`` run on the loss owner alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from d9d_lightning.errors import PipelineConfigurationError, PlaceholderReadError
from d9d_lightning.partition.placeholder import is_placeholder
from d9d_lightning.strategy.compat import is_overridden
from d9d_lightning.strategy.logbook import LogBook
from d9d_lightning.strategy.messages import Messenger
from d9d_lightning.strategy.norms import warn_of_local_norms
from d9d_lightning.strategy.outside import Around, run_around
from d9d_lightning.values import LogRecord

__all__ = ["LOGGING_HOOKS", "HookWrappers", "refuse_unknown"]

LOGGING_HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_test_start",
    "on_test_epoch_start",
    "on_test_batch_start",
    "on_test_batch_end",
    "on_test_epoch_end",
)
"""Hooks of a module in which Lightning allows ``self.log``."""


SILENT_HOOKS = (
    "on_fit_start",
    "on_fit_end",
    "on_train_end",
    "on_validation_end",
    "on_test_end",
    "on_predict_start",
    "on_predict_epoch_start",
    "on_predict_batch_start",
    "on_predict_batch_end",
    "on_predict_epoch_end",
    "on_predict_end",
)
"""Hooks of a module in which ``self.log`` is not allowed, but calling the module is."""


_ANSWERING_HOOKS = frozenset({"on_train_batch_start"})
"""Hooks whose answer decides how the loop goes on (-1 ends the epoch), so all ranks take that of the loss owner."""


def refuse_unknown(records: Iterable[LogRecord]) -> None:
    """Refuse to log what is known on another rank only.

    Raises:
        PlaceholderReadError: Names the key, and where the value comes from.
    """
    for record in records:
        if is_placeholder(record.value):
            raise PlaceholderReadError(
                f"self.log({record.name!r}, ...) in {record.hook} was given what was computed from "
                f"{record.value.origin!r}, which lives on another rank, so the value is not known here. Expected: a "
                "number that each rank can compute. For norms of gradients use d9d_lightning.strategy.grad_norm; for "
                "anything else of all parameters, put the lines, on all ranks, within "
                "`with self.trainer.strategy.whole_module():`."
            )


class HookWrappers:
    """Wraps hooks when a run starts and takes the wrappers away when it ends.

    Args:
        module: The user's module.
        owner_only: Names of hooks that run on the loss owner alone.

    Raises:
        PipelineConfigurationError: ``owner_only`` names something that the module does not have.
    """

    def __init__(self, module: LightningModule, owner_only: Iterable[str]) -> None:
        self._module = module
        self._owner_only = tuple(owner_only)
        self._wrapped: list[str] = []
        for name in self._owner_only:
            if not name.startswith("on_") or not callable(getattr(module, name, None)):
                raise PipelineConfigurationError(
                    f"owner_only_hooks names {name!r}, but {type(module).__name__} has no such hook. "
                    f"Hooks that can be named: {', '.join(LOGGING_HOOKS)}."
                )

    def install(self, trainer: Trainer, messenger: Messenger, around: Around) -> None:
        """Wrap every overridden hook.

        Args:
            trainer: The trainer.
            messenger: From the loss owner to the others.
            around: Context in which hooks may call the module.
        """
        if messenger.group is None:
            return
        for name in dict.fromkeys((*LOGGING_HOOKS, *SILENT_HOOKS, *self._owner_only)):
            if name in vars(self._module) or not is_overridden(name, self._module):
                continue
            hook = run_around(getattr(self._module, name), around)
            if name not in SILENT_HOOKS:
                hook = self._wrap(hook, trainer, messenger, name)
            object.__setattr__(self._module, name, hook)
            self._wrapped.append(name)

    def remove(self) -> None:
        """Give the module its own hooks back."""
        for name in self._wrapped:
            vars(self._module).pop(name, None)
        self._wrapped.clear()

    def _wrap(self, hook: Callable[..., Any], trainer: Trainer, messenger: Messenger, name: str) -> Callable[..., Any]:
        module = self._module
        owner_only = name in self._owner_only
        owner_answers = owner_only or name in _ANSWERING_HOOKS

        @wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            skip = owner_only and not messenger.is_source
            book = trainer._results
            if not isinstance(book, LogBook) or trainer.barebones:
                return None if skip else hook(*args, **kwargs)
            with book.capture(trainer, owner=messenger.is_source) as records:
                result = None if skip else hook(*args, **kwargs)
            if messenger.is_source:
                refuse_unknown(records)
            logged, owned = messenger.share(lambda: (records, result if owner_answers else None))
            warn_of_local_norms(module, logged)
            book.replay(trainer, module, logged)
            return owned if owner_answers else result

        return run
