"""Requests of the stage process, in their order: rank 0 reads them from its standard input and passes them on to the others.

A request is a line of JSON, whose `bytes` says how many bytes of plain numbers follow it. Where the input ends before a request to
close, the stage process is gone, and so is the reason to compute.
"""

from __future__ import annotations

import datetime
import json
import os
import queue
import threading
import time
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from .parallel import Ranks

CLOSE = "close"
# Between two requests the stage process may take as long as it likes; that rank 0 is gone, the watch notices.
_WAITING = datetime.timedelta(days=365)
_PASSING_ON = "pass a request on"
# What a rank that fails at the same time needs to say why.
_LAST_WORDS_SECONDS = 0.5


@dataclass(frozen=True)
class Request:
    """What is to be done, and the numbers that belong to it."""

    name: str
    fields: dict[str, Any]
    payload: memoryview

    @classmethod
    def of(cls, message: bytearray) -> Request:
        """Reads a request as it was sent."""
        end = message.index(b"\n") + 1
        fields: dict[str, Any] = json.loads(message[:end])
        return cls(fields.pop("request"), fields, memoryview(message)[end:])


class Requests:
    """The requests, as each rank gets them."""

    def __init__(self, ranks: Ranks, source: BinaryIO) -> None:
        self._ranks = ranks
        self._read: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        self._group: Any = dist.new_group(backend="gloo", timeout=_WAITING) if ranks.world > 1 else None
        if ranks.rank == 0:
            threading.Thread(target=self._listen, args=(source,), name="requests", daemon=True).start()

    def next(self) -> Request:
        """The next request; on every rank the same."""
        if self._ranks.world == 1:
            return Request.of(self._read.get())
        if self._ranks.rank == 0:
            message = self._read.get()
            # From here on it waits for the others, which may be gone or hang.
            with self._ranks.collective(_PASSING_ON):
                dist.broadcast(torch.tensor([len(message)]), 0, group=self._group)
                dist.broadcast(torch.frombuffer(message, dtype=torch.uint8), 0, group=self._group)
            return Request.of(message)
        length = torch.zeros(1, dtype=torch.int64)
        # This may take as long as the stage process likes.
        dist.broadcast(length, 0, group=self._group)
        message = bytearray(int(length))
        with self._ranks.collective(_PASSING_ON):
            dist.broadcast(torch.frombuffer(message, dtype=torch.uint8), 0, group=self._group)
        return Request.of(message)

    def _listen(self, source: BinaryIO) -> None:
        """Reads ahead of the work, so that the next request is there when one is done."""
        while line := source.readline():
            fields = json.loads(line)
            self._read.put(bytearray(line + source.read(fields["bytes"])))
            if fields["request"] == CLOSE:
                return
        time.sleep(_LAST_WORDS_SECONDS)
        os._exit(1)
