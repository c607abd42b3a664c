"""Ranks as processes that are forked from one that has imported torch already: starting a rank anew takes seconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from support import Ran, environment, write_job

_PRELOADED = ["train", "inference", "serving", "sharding", "parallel", "requests"]


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]
    os.environ["OMP_NUM_THREADS"] = "1"
    context.set_forkserver_preload([f"pipeline_torch_worker.{name}" for name in _PRELOADED])
    return context


def _rank(path: str, variables: dict[str, str], requests: Any) -> None:
    """What a rank does: the worker's own `main`, with its streams in files."""
    os.environ.update(variables)
    folder, rank = Path(path).parent, variables["RANK"]
    for descriptor, name in ((1, f"events-{rank}.jsonl"), (2, f"errors-{rank}.txt")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
    if requests is not None:
        os.dup2(requests.fileno(), 0)
        sys.stdin = os.fdopen(0)
    sys.argv[1:] = [path]
    from pipeline_torch_worker.__main__ import main

    main()


@dataclass
class Running:
    """Ranks at work."""

    root: Path
    ranks: list[BaseProcess]
    # To rank 0; a process that is gone ends it.
    requests: Any

    def send(self, requests: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            while requests:
                requests = requests[os.write(self.requests.fileno(), requests) :]

    def kill(self, rank: int, number: signal.Signals) -> None:
        pid = self.ranks[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def wait_for(self, there: Callable[[], bool], seconds: float = 300.0) -> None:
        deadline = time.monotonic() + seconds
        while not there():
            assert time.monotonic() < deadline, self._errors()
            assert any(rank.is_alive() for rank in self.ranks), self._errors()
            time.sleep(0.01)

    def wait_for_answers(self, count: int) -> None:
        """Until rank 0 has answered so often."""
        events = self.root / "events-0.jsonl"
        self.wait_for(lambda: events.exists() and events.read_bytes().count(b'"answer"') >= count)

    def finish(self, seconds: float = 300.0) -> Ran:
        """What rank 0 said, and its exit code."""
        self.ranks[0].join(seconds)
        for rank in self.ranks[1:]:
            rank.join(20.0)
            rank.kill()
        code = self.ranks[0].exitcode
        assert code is not None, self._errors()
        return Ran(code, (self.root / "events-0.jsonl").read_bytes(), self.root, self._errors())

    def wait_for_end(self, seconds: float = 30.0) -> None:
        """Until every rank is gone."""
        for rank in self.ranks:
            rank.join(seconds)
            assert rank.exitcode is not None, self._errors()

    def _errors(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.root.glob("errors-*.txt")))


def start(root: Path, job: dict[str, Any], ranks: int, requests: bytes = b"", /, **variables: str) -> Running:
    """Starts a job in so many ranks, as the stage process does; rank 0 gets the requests, and waits for more."""
    path = str(write_job(root, job))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes, ours = [], None
    for rank in range(ranks):
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        theirs, ours = (Connection(descriptor) for descriptor in os.pipe()) if rank == 0 else (None, ours)
        process = _context().Process(target=_rank, args=(path, {**place, **variables}, theirs))
        process.start()
        processes.append(process)
    running = Running(root, processes, ours)
    # Of more than a pipe holds only as much is written as is read.
    threading.Thread(target=running.send, args=(requests,), daemon=True).start()
    return running


def run_ranks(root: Path, job: dict[str, Any], ranks: int, requests: bytes = b"", /, **variables: str) -> Ran:
    """Runs a job in so many ranks."""
    return start(root, job, ranks, requests, **variables).finish()
