"""The request to stop: a signal sets a flag, at which training looks between steps."""

from __future__ import annotations

import signal
import time
from types import FrameType


class StopRequest:
    """Whether the user asked to stop, and when."""

    def __init__(self) -> None:
        self.since: float | None = None

    def heed_signals(self) -> None:
        """Takes SIGTERM and SIGINT for a request to stop."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        if self.since is None:
            self.since = time.monotonic()

    def __bool__(self) -> bool:
        return self.since is not None
