"""What the worker says: one JSON object per line on the standard output of rank 0.

Its form is `event` in the engine's `protocol.schema.json`. The line of an answer may say by `bytes` how many bytes of plain numbers
follow it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any, BinaryIO

from .failure import JobFailure


class Voice:
    """Says events, or keeps silent where it has nothing to write to (any rank but 0)."""

    def __init__(self, to: BinaryIO | None) -> None:
        self._to = to
        # The watch speaks from a thread of its own, and perhaps of the end that the main one is about to tell.
        self._lock = threading.Lock()
        self._is_over = False

    @classmethod
    def of_process(cls, rank: int) -> Voice:
        """Takes standard output for itself: what libraries print goes to standard error from here on."""
        sys.stdout.flush()
        own = os.dup(1)
        os.dup2(2, 1)
        return cls(os.fdopen(own, "wb") if rank == 0 else None)

    def say(self, event: str, **fields: Any) -> None:
        """Says one event."""
        with self._lock:
            if self._to is None or self._is_over:
                return
            self._is_over = event in ("failed", "finished")
            self._write({"event": event, **fields})

    def answer(self, answer: Any, numbers: bytes | None = None) -> None:
        """Answers a request of the stage process, with the numbers that belong to the answer."""
        with self._lock:
            if self._to is not None and not self._is_over:
                line = {"answer": answer} if numbers is None else {"answer": answer, "bytes": len(numbers)}
                self._write(line, numbers or b"")

    def _write(self, line: dict[str, Any], numbers: bytes = b"") -> None:
        assert self._to is not None
        self._to.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._to.write(numbers)
        self._to.flush()

    def started(self) -> None:
        """The worker is up."""
        self.say("started", protocol=1)

    def progress(self, unit: str, done: int, total: int | None, note: str | None = None) -> None:
        """How far it is."""
        self.say("progress", unit=unit, done=done, total=total, note=note)

    def warning(self, message: str) -> None:
        """Something the user should know."""
        self.say("warning", message=message)

    def finished(self, how: dict[str, Any]) -> None:
        """All is written. The engine's stage process makes outputs of it."""
        self.say("finished", outputs={}, how=how)

    def failed(self, failure: JobFailure) -> None:
        """Nothing more will come."""
        self.say("failed", **failure.to_json())
