"""Number types: what is computed in which, and the factor on the loss that f16 needs."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from .job import DType, LossScaleSettings

COMPUTE_TYPES: dict[DType, torch.dtype] = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}

# The factor does not fall below this, and so many overflows in a row there mean that the factor is not what is at fault.
LEAST_SCALE = 1.0
HOPELESS = 8


def computing_in(dtype: DType, device: torch.device) -> AbstractContextManager[object]:
    """Products in `dtype`; sums, norms and losses stay in f32, as torch decides for each operation."""
    compute = COMPUTE_TYPES[dtype]
    return torch.autocast(device.type, dtype=compute, enabled=compute != torch.float32)


@dataclass
class ScalerState:
    """The factor on the loss and how it came to be where it is: part of the working state."""

    scale: float
    growth_tracker: int = 0
    skipped: int = 0
    skipped_at_min: int = 0


class LossScaler:
    """Grows while gradients stay finite, backs off when they overflow: the rule of `torch.amp.GradScaler`.

    That one keeps its state on the device and looks at an optimizer's parameters; this one's state is saved with the step.
    """

    def __init__(self, settings: LossScaleSettings) -> None:
        self._settings = settings
        self.state = ScalerState(_f32(settings.init_scale))

    @property
    def scale(self) -> float:
        """The factor in use."""
        return self.state.scale

    def after_step(self) -> None:
        """After a step whose gradients were all finite."""
        state = self.state
        state.skipped = state.skipped_at_min = 0
        state.growth_tracker += 1
        if state.growth_tracker < self._settings.growth_interval:
            return
        state.growth_tracker = 0
        grown = _f32(state.scale * self._settings.growth_factor)
        if math.isfinite(grown):
            state.scale = grown

    def after_overflow(self) -> None:
        """After gradients that overflowed, which are not used."""
        state = self.state
        state.skipped += 1
        if state.scale <= LEAST_SCALE:
            state.skipped_at_min += 1
        state.growth_tracker = 0
        smaller = _f32(state.scale * self._settings.backoff_factor)
        state.scale = max(smaller, min(LEAST_SCALE, state.scale))

    @property
    def is_hopeless(self) -> bool:
        """Whether no smaller factor can be hoped for."""
        return self.state.skipped_at_min >= HOPELESS


def _f32(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))
