"""Chooses the next token from logits: the likeliest, or one drawn from what temperature, top-k, top-p and min-p leave.

Each setting is that of the logits processor of its name in transformers, in its order. The draw depends on seed, row and position
alone, so that a batch gives the same tokens in whatever order or company its prompts are computed. It is the native worker's own
(`model/src/sampling.rs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .draws import SAMPLING, uniform
from .failure import JobFailure

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def choose(self, logits: Logits, seen: Sequence[int], banned: Sequence[int], seed: int, row: int) -> int:
        """The token that follows `seen`; of equally likely ones the lowest id."""
        left = self.process(logits, seen, banned)
        if self.temperature == 0:
            return int(left.argmax())
        weights = _weights(left)
        share = uniform(seed, SAMPLING, step=len(seen), row=row) * weights.sum()
        found = int(np.searchsorted(weights.cumsum(), share, side="right"))
        # Rounding may put the share at the very end.
        return found if found < len(weights) and weights[found] > 0 else int(np.flatnonzero(weights)[-1])

    def process(self, logits: Logits, seen: Sequence[int], banned: Sequence[int]) -> Logits:
        """The logits that the choice is made by; minus infinity for what is out of it."""
        if np.isnan(logits).any() or np.isposinf(logits).any():
            token = int(np.flatnonzero(np.isnan(logits) | np.isposinf(logits))[0])
            raise JobFailure("numeric", f"the logit of token {token} is {logits[token]}")
        left = logits.astype(np.float32, copy=True)
        if self.repetition_penalty is not None:
            _penalize(left, seen, np.float32(self.repetition_penalty))
        left[[token for token in banned if token < len(left)]] = -np.inf
        if self.temperature != 0:
            left = self._warp(left)
        if np.isneginf(left).all():
            raise JobFailure("numeric", "there is no token to choose from")
        return left

    def _warp(self, left: Logits) -> Logits:
        temperature = np.float32(self.temperature)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            warmed: Logits = left / temperature
            if (np.isfinite(left) & ~np.isfinite(warmed)).any():
                # So cold that f32 cannot hold the quotients: those of the distances to the greatest logit say the same.
                warmed = np.where(left == left.max(), np.float32(0), (left - left.max()) / temperature)
        if self.top_k is not None and self.top_k < len(warmed):
            least = np.partition(warmed, -self.top_k)[-self.top_k]
            warmed[warmed < least] = -np.inf
        if self.top_p is not None and self.top_p < 1:
            _keep_top_p(warmed, self.top_p)
        if self.min_p is not None:
            weights = _weights(warmed)
            shares = (weights / weights.sum()).astype(np.float32)
            warmed[shares < np.float32(self.min_p) * np.float32(1 / weights.sum())] = -np.inf
        return warmed


def _keep_top_p(left: Logits, top_p: float) -> None:
    """Takes tokens away from the least likely on, as long as together they have no more than `1 - top_p`; never the last one."""
    weights = _weights(left)
    shares = (weights / weights.sum()).astype(np.float32)
    # The least likely first; of equals the lowest ids stay.
    order = np.lexsort((-np.arange(len(left)), left))
    order = order[left[order] > -np.inf]
    together = np.cumsum(shares[order].astype(np.float64)).astype(np.float32)
    out = together[:-1] <= np.float32(1 - top_p)
    left[order[:-1][out]] = -np.inf


def _weights(logits: Logits) -> NDArray[np.float64]:
    """Probabilities before scaling: 1 for the likeliest token."""
    weights: NDArray[np.float64] = np.exp((logits - logits.max()).astype(np.float64))
    return weights


def _penalize(logits: Logits, seen: Sequence[int], penalty: np.float32) -> None:
    """Keskar et al., arXiv:1909.05858: once per distinct token."""
    tokens = np.unique([token for token in seen if token < len(logits)]).astype(np.int64)
    before = logits[tokens]
    with np.errstate(over="ignore"):
        scaled = np.where(before < 0, before * penalty, before / penalty)
    limit = np.finfo(np.float32).max
    logits[tokens] = np.where(np.isfinite(before), np.clip(scaled, -limit, limit), before)
