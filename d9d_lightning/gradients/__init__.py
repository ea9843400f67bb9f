"""Gradients between backward and optimizer: averaged over replicas while backward runs, measured, clipped.

Knows no pipeline: it is told how many accumulations to expect, or when they are over. ``plan`` and ``binding`` say who
is reduced with whom, ``slot`` and ``bucket`` hold gradients, ``reduction`` and ``agreement`` talk to other ranks,
``ledger`` counts and launches, ``synchronizer`` is the one object that callers use, ``norm`` measures and clips.
"""

from d9d_lightning.gradients.bucket import AbstractGradientBucket, LocalGradientBucket, SyncGradientBucket
from d9d_lightning.gradients.norm import (
    clip_gradients_by_norm,
    clip_gradients_by_value,
    global_gradient_norm,
    global_parameter_norms,
    scale_gradients,
)
from d9d_lightning.gradients.synchronizer import GradientSynchronizer

__all__ = [
    "AbstractGradientBucket",
    "GradientSynchronizer",
    "LocalGradientBucket",
    "SyncGradientBucket",
    "clip_gradients_by_norm",
    "clip_gradients_by_value",
    "global_gradient_norm",
    "global_parameter_norms",
    "scale_gradients",
]
