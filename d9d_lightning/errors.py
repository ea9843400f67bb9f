"""Every error this package raises on purpose.

Each one also subclasses the built-in type that fits it, so that ``except ValueError`` written against the original
d9d classes keeps working. A message says what was given, what was expected, and what to type next.
"""

from __future__ import annotations

from pickle import UnpicklingError

__all__ = [
    "GradientSyncError",
    "MessageMismatchError",
    "PartitionError",
    "PipelineConfigurationError",
    "PipelineError",
    "PipelineStateError",
    "PipelineStateMissingError",
    "PipelineTransferError",
    "PipelineTransferNameError",
    "PlaceholderReadError",
    "PretrainedWeightsError",
    "RankFailedError",
    "ScheduleDeadlockError",
    "ScheduleError",
    "StageError",
    "StageGradientError",
    "UnplannedCallError",
    "UnsafeCheckpointError",
    "WorkerError",
]


class PipelineError(Exception):
    """Base of all errors raised by d9d_lightning."""


class ScheduleError(PipelineError, ValueError):
    """A schedule was asked for something its family cannot do, or a program is incomplete or illegal."""


class ScheduleDeadlockError(ScheduleError, RuntimeError):
    """Every rank of a program waits for another one."""


class PartitionError(PipelineError, ValueError):
    """The module or its step cannot be cut into the requested stages."""


class PipelineConfigurationError(PipelineError, ValueError):
    """An argument of the strategy, or the module it was given, is not supported."""


class PretrainedWeightsError(PipelineError, ValueError):
    """A file of pretrained weights does not exist, is broken, or belongs to another module."""


class UnsafeCheckpointError(PipelineError, UnpicklingError):
    """A checkpoint holds objects that are only read with ``weights_only=False``."""


class PipelineStateError(PipelineError, ValueError):
    """A whole-batch or per-microbatch value was stored or read against its sharding specification."""


class PipelineStateMissingError(PipelineStateError, KeyError):
    """A value, or one microbatch of it, is read before it was written."""

    # KeyError would show the message in quotes.
    __str__ = Exception.__str__


class PipelineTransferError(PipelineError, RuntimeError):
    """A tensor to be sent does not match what its receiver expects."""


class PipelineTransferNameError(PipelineTransferError, KeyError):
    """A tensor that one side of a transfer expects is not among those of the other side."""

    # KeyError would show the message in quotes.
    __str__ = Exception.__str__


class MessageMismatchError(PipelineTransferError):
    """A rank was sent another message than it waits for; the message says by whom, and shows both."""


class StageError(PipelineError, RuntimeError):
    """A stage failed while it computed one microbatch."""


class StageGradientError(StageError, ValueError):
    """A backward action was called out of order, twice, or without what it needs."""


class PlaceholderReadError(StageError):
    """The step read the value of a tensor that lives on another stage."""


class UnplannedCallError(StageError):
    """The step called units in an order, or with results, that the plan does not have."""


class GradientSyncError(PipelineError, ValueError):
    """Gradients were accumulated, awaited or bound against the contract of the synchronizer."""


class WorkerError(PipelineError, RuntimeError):
    """A function that ran once per rank raised, hung or lost its process on at least one rank."""


class RankFailedError(PipelineError, RuntimeError):
    """Another rank failed first; the message holds its rank, its action and its traceback."""
