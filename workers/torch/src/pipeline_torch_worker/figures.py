"""The figures of training: lines of `metrics.jsonl`, events, and the line that a person reads.

What depends on nothing but the run's inputs is in the records, which become part of a result. Speed and memory are told and not
kept there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .events import Voice
from .json_text import json_text

Record = dict[str, Any]
# How long the clock adds up before it gives a new figure.
WINDOW_SECONDS = 2.0


@dataclass
class Tokens:
    """What was computed in a step, by how it is counted."""

    targets: float = 0
    """Tokens that the loss is taken over: `trained_tokens_per_second`."""
    computed: float = 0
    """Tokens of documents: `tokens_per_second`."""
    padded: float = 0
    """What they are with padding, as other programs compute and count them: each row of a micro-batch as long as the longest."""


class Teller:
    """Tells how training goes, and keeps the records."""

    def __init__(self, lines: str, voice: Voice) -> None:
        self.lines = lines
        self._voice = voice
        self._clock = _Clock()

    def step(self, record: Record, tokens: Tokens, peaks: Sequence[int], total_steps: int) -> None:
        """Tells of an optimizer step, and of the most memory that each rank has had."""
        speed = self._clock.per_second(tokens)
        peak = max(peaks)
        of_rank = f" (rank {peaks.index(peak)})" if len(peaks) > 1 else ""
        self._tell(
            record,
            {
                "trained_tokens_per_second": speed.targets,
                "tokens_per_second": speed.computed,
                "padded_tokens_per_second": speed.padded,
                "peak_memory_bytes": peak,
            },
        )
        grad_norm = record["grad_norm"]
        line = (
            f"{record['epoch']}|{record['step']}|Loss: {record['loss']:.4f} lr: {record['learning_rate']:.2e} "
            f"grad_norm: {'inf' if grad_norm is None else f'{grad_norm:.3f}'}"
            f"{' (skipped: gradients overflowed)' if record['skipped'] else ''} · {speed.targets:.0f} trained tokens/s · "
            f"{speed.computed:.0f} tokens/s · {speed.padded:.0f} padded tokens/s · peak memory {peak / 2**30:.2f} GiB{of_rank}"
        )
        self._voice.progress("steps", record["step"], total_steps, line)

    def validation(self, record: Record, seconds: float, total_steps: int) -> None:
        """Tells of a validation that took so long, which is no part of the speed of training."""
        self._tell(record, {})
        self._clock.leave_out(seconds)
        line = f"{record['epoch']}|{record['step']}|Validation loss: {record['loss']:.4f}"
        self._voice.progress("steps", record["step"], total_steps, line)

    def _tell(self, record: Record, more: dict[str, float]) -> None:
        self.lines += json_text(record) + "\n"
        self._voice.metrics({**record, **more})


class _Clock:
    """Speed over the last few seconds, which a single step would give too unsteadily."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._tokens = Tokens()
        self._last: Tokens | None = None

    def leave_out(self, seconds: float) -> None:
        """Counts on as if this time had not passed."""
        self._since += seconds

    def per_second(self, tokens: Tokens) -> Tokens:
        """Adds a step and gives the speed."""
        so_far = self._tokens
        so_far.targets += tokens.targets
        so_far.computed += tokens.computed
        so_far.padded += tokens.padded
        seconds = max(time.monotonic() - self._since, 1e-9)
        now = Tokens(so_far.targets / seconds, so_far.computed / seconds, so_far.padded / seconds)
        if seconds > WINDOW_SECONDS:
            self._since, self._tokens, self._last = time.monotonic(), Tokens(), now
        return self._last or now
