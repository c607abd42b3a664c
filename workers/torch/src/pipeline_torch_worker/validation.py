"""Validation: when the model is scored on rows that it does not learn from, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .job import EarlyStopping


@dataclass
class Best:
    """The step with the lowest validation loss."""

    step: int
    loss: float


@dataclass
class Course:
    """How validation has gone so far: part of the working state."""

    last: int | None = None
    best: Best | None = None
    without_improvement: int = 0

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Course:
        """Reads it from a saved state."""
        best = value["best"]
        return cls(value["last"], None if best is None else Best(**best), value["without_improvement"])

    def add(self, step: int, loss: float, stopping: EarlyStopping | None) -> bool:
        """Takes in the loss after so many steps; whether it is the lowest.

        The loss before the first step is there to be looked at: it is no candidate.
        """
        self.last = step
        if step == 0:
            return False
        least = None if self.best is None else self.best.loss
        min_delta = stopping.min_delta if stopping else 0.0
        improved = least is None or least - loss > min_delta
        self.without_improvement = 0 if improved else self.without_improvement + 1
        lowest = least is None or loss < least
        if lowest:
            self.best = Best(step, float(loss))
        return lowest

    def ends_early(self, stopping: EarlyStopping | None) -> bool:
        """Whether training ends here."""
        return stopping is not None and self.without_improvement >= stopping.patience
