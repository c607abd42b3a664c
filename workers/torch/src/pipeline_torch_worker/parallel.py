"""The ranks of a job: who they are, what they add up, and the watch over them.

Gradients go through the device's own collectives, figures through gloo on the processor. Each collective is announced in the store
that the ranks meet at, so that where one hangs the others can say who has not come.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from .device import Device, let_the_watch_come_first
from .events import Voice
from .failure import JobFailure, cause_of

# Values of a gradient bucket: 64 MiB of f32.
BUCKET = 16 * 1024 * 1024
# How long a failed rank waits for rank 0 to say so, and rank 0 for the rank whose failure was first.
TELL_SECONDS = 10.0
_POLL_SECONDS = 0.2
# A rank whose watch has not been heard for so long does nothing at all.
_SILENT_SECONDS = 2.0
# The descriptor of the socket at `MASTER_PORT`, where it is inherited.
LISTENER = "PIPELINE_LISTENER"
_FAILED, _TOLD = "failed", "told"


@dataclass(frozen=True)
class Place:
    """Where this process stands among those that torchrun, or an executor in its place, has started."""

    rank: int
    world: int
    local_rank: int
    local_world: int

    @classmethod
    def of_environment(cls) -> Place:
        """As the variables say that torchrun sets; alone where they are not there."""

        def number(name: str, default: int) -> int:
            return int(os.environ.get(name, default))

        world = number("WORLD_SIZE", 1)
        return cls(number("RANK", 0), world, number("LOCAL_RANK", 0), number("LOCAL_WORLD_SIZE", world))


class Ranks:
    """The ranks of a job, of which this process is one."""

    def __init__(self, place: Place, device: Device, watch: Watch | None) -> None:
        self.rank, self.world = place.rank, place.world
        self.device = device
        self._watch = watch
        self.step = 0

    @classmethod
    def alone(cls, device: Device) -> Ranks:
        """One rank, that has nobody to wait for."""
        return cls(Place(0, 1, 0, 1), device, None)

    @classmethod
    def join(cls, place: Place, device: Device, seconds: float, voice: Voice) -> Ranks:
        """Meets the others."""
        if place.world == 1:
            return cls.alone(device)
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # torchrun has a store of its own there; without it the first rank's is the one.
        is_host = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        limit = datetime.timedelta(seconds=seconds)
        # A port that was free when this process was started may be another's by now: its socket comes with it.
        listener = os.environ.get(LISTENER) if is_host else None
        descriptor = None if listener is None else int(listener)
        store = TCPStore(
            host, port, is_master=is_host, wait_for_workers=False, timeout=limit, master_listen_fd=descriptor
        )
        ours = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        # A restarted group must not read what the one before it left in the same store.
        run = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        watch = Watch(place, PrefixStore(f"watch/{run}", ours), seconds, voice)
        watch.start()
        backend = "gloo" if device.kind == "cpu" else f"cpu:gloo,{device.torch.type}:{device.collectives}"
        if device.collectives == "gloo":
            backend = "gloo"
        let_the_watch_come_first(device, seconds)
        ranks = cls(place, device, watch)
        with ranks._collective("meet the other ranks"):
            dist.init_process_group(
                backend,
                store=PrefixStore(f"group/{run}", store),
                rank=place.rank,
                world_size=place.world,
                # The watch comes first, and knows more.
                timeout=limit + datetime.timedelta(seconds=60),
            )
        return ranks

    def sum(self, values: Sequence[float], what: str) -> list[float]:
        """Sums of figures over all ranks, in f64."""
        if self.world == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        with self._collective(what):
            dist.all_reduce(total)
        return [float(value) for value in total]

    def greatest(self, value: int, what: str) -> int:
        """The greatest of a figure over all ranks."""
        return int(max(self.gather(value, what)))

    def gather(self, value: float, what: str) -> list[float]:
        """A figure of every rank, by rank."""
        return self.sum(self.placed(value), what)

    def gather_lists(self, values: list[Any], what: str) -> list[list[Any]]:
        """A list of numbers, or of lists of them, of every rank, by rank."""
        if self.world == 1:
            return [values]
        own = torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8)
        lengths = [int(length) for length in self.gather(len(own), what)]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(own)] = own
        found = [torch.zeros_like(padded) for _ in lengths]
        with self._collective(what):
            dist.all_gather(found, padded)
        pairs = zip(found, lengths, strict=True)
        return [json.loads(bytes(text[:length].tolist())) for text, length in pairs]

    def placed(self, value: float) -> list[float]:
        """A figure of this rank among zeros for the others: the sum over all ranks has that of each, by rank."""
        places = [0.0] * self.world
        places[self.rank] = value
        return places

    def add_up(self, tensors: list[torch.Tensor], what: str) -> None:
        """Puts the sums over all ranks in the place of the tensors: a few large collectives, not one for each."""
        if self.world == 1:
            return
        bucket: list[torch.Tensor] = []
        for tensor in tensors:
            if bucket and sum(part.numel() for part in bucket) + tensor.numel() > BUCKET:
                self._add_up_bucket(bucket, what)
                bucket = []
            bucket.append(tensor)
        if bucket:
            self._add_up_bucket(bucket, what)

    def _add_up_bucket(self, tensors: list[torch.Tensor], what: str) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        if self.device.collectives == "gloo":
            flat = flat.cpu()
        with self._collective(what):
            dist.all_reduce(flat)
            self.device.synchronize()
        for tensor, total in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(total.view_as(tensor))

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Watches over collectives that are not this class's own, such as those of FSDP."""
        with self._collective(what):
            yield

    @contextmanager
    def _collective(self, what: str) -> Iterator[None]:
        if self._watch is None:
            yield
            return
        self._watch.enter(self.step, what)
        try:
            yield
        except JobFailure:
            raise
        except Exception as error:
            raise self._watch.broken(error) from error
        finally:
            self._watch.leave()

    def fail(self, failure: JobFailure) -> JobFailure:
        """Tells the others of this rank's failure; what rank 0 is to say, which is the first rank's."""
        return failure if self._watch is None else self._watch.fail(failure)

    def told(self) -> None:
        """Lets the others know that rank 0 has said why the run ends."""
        if self._watch is not None and self.rank == 0:
            self._watch.let_go()

    def leave(self) -> None:
        """Ends the group, when all is done."""
        if self._watch is not None:
            self._watch.end()
            dist.destroy_process_group()


@dataclass
class _Waiting:
    """A collective that this rank is in."""

    number: int
    step: int
    what: str
    since: float

    def __str__(self) -> str:
        return f"`{self.what}` of step {self.step}" if self.step else f"`{self.what}`"


class Watch(threading.Thread):
    """Ends the run where ranks wait too long for each other, or where one has failed; rank 0 says which, and in its words."""

    def __init__(self, place: Place, store: Store, seconds: float, voice: Voice) -> None:
        super().__init__(name="watch", daemon=True)
        self._place = place
        self._store = store
        self._seconds = seconds
        self._voice = voice
        self._waiting: _Waiting | None = None
        self._count = 0
        self._ended = threading.Event()
        # A store's connection serves one request at a time; the number of that one, or nothing.
        self._lock = threading.Lock()
        self._asked: int | None = None
        self._requests = 0

    def start(self) -> None:
        """Begins to watch, and to watch over this watch: a store does not answer where the rank that holds it is stopped."""
        super().start()
        threading.Thread(target=self._watch_store, name="watch of the store", daemon=True).start()

    def enter(self, step: int, what: str) -> None:
        """This rank comes to a collective."""
        self._count += 1
        self._post(f"at/{self._place.rank}", self._count)
        self._waiting = _Waiting(self._count, step, what, time.monotonic())

    def leave(self) -> None:
        """It is through."""
        self._waiting = None

    def end(self) -> None:
        """Nothing is left to watch over."""
        self._ended.set()
        self.join()

    def broken(self, error: Exception) -> JobFailure:
        """The failure of a collective that broke off."""
        waiting = self._waiting
        late = ""
        # Where rank 0 is gone, so is its store.
        with contextlib.suppress(Exception):
            late = self._behind()
        message = f"rank {self._place.rank}: {waiting} broke off{late}"
        failure = JobFailure("crashed", message, _LOOK)
        failure.__cause__ = error
        return failure

    def fail(self, failure: JobFailure) -> JobFailure:
        """Posts this rank's failure; the first to be posted is the one that is told."""
        if self._place.rank == 0:
            # A collective that broke off is seldom the beginning: the rank that caused it may be about to say why.
            first = self._first_failure(wait=TELL_SECONDS / 2 if failure.cause == "crashed" else 0.0)
            self._ended.set()
            return first or failure
        self._ended.set()
        # Rank 0 may be gone already, and its store with it.
        with contextlib.suppress(Exception):
            with self._asking():
                self._store.compare_set(_FAILED, "", json.dumps({"rank": self._place.rank, **failure.to_json()}))
            deadline = time.monotonic() + TELL_SECONDS
            while time.monotonic() < deadline and not self._has(_TOLD):
                time.sleep(_POLL_SECONDS)
        return failure

    def run(self) -> None:
        """Looks at the others, and at the clock."""
        beat = 0
        while not self._ended.wait(_POLL_SECONDS):
            try:
                beat += 1
                self._post(f"beat/{self._place.rank}", beat)
                failure = self._look()
            except Exception as error:
                # The store is gone, and with it whoever held it: perhaps since all is done, as this rank is about to hear.
                if self._ended.wait(_SILENT_SECONDS):
                    return
                failure = JobFailure("crashed", f"rank {self._place.rank} has lost the others", _LOOK)
                failure.__cause__ = error
            if failure is not None and not self._ended.is_set():
                self._end_run(failure)

    def _watch_store(self) -> None:
        """Ends this rank where the store does not answer. Nobody can be told: rank 0, which says why a run ends, has it."""
        before, silent = None, 0.0
        while True:
            # Not by the clock, which goes on where all ranks are stopped for a while.
            time.sleep(_POLL_SECONDS)
            asked, waiting = self._asked, self._waiting
            silent = silent + _POLL_SECONDS if asked is not None and asked == before else 0.0
            before = asked
            if silent > self._seconds:
                where = "" if waiting is None else f" in {waiting}"
                message = f"rank {self._place.rank} has waited {self._seconds:g} s for the store of the ranks{where}"
                print(f"{message}; ranks that are stopped, gone or out of reach: 0", file=sys.stderr, flush=True)
                os._exit(1)

    def _look(self) -> JobFailure | None:
        if self._place.rank == 0:
            first = self._first_failure(wait=0.0)
            if first is not None:
                return first
        else:
            # A store that is stopped takes what it is sent, and answers nothing.
            self._has(_FAILED)
        waiting, now = self._waiting, time.monotonic()
        if waiting is None:
            return None
        if now - waiting.since > self._seconds:
            message = f"rank {self._place.rank} has waited {self._seconds:g} s in {waiting}{self._behind()}"
            return JobFailure("timeout", message, _LOOK)
        return None

    def _end_run(self, failure: JobFailure) -> None:
        """From this thread: the main one is in a call that does not return."""
        print(f"rank {self._place.rank}: {failure}", file=sys.stderr, flush=True)
        if self._place.rank == 0:
            self.tell(failure)
        else:
            self.fail(failure)
        os._exit(1)

    def tell(self, failure: JobFailure) -> None:
        """Rank 0 says it, and lets the others know."""
        self._voice.failed(failure)
        self.let_go()

    def let_go(self) -> None:
        """Ranks that have failed need wait no longer."""
        with contextlib.suppress(Exception), self._asking():
            self._store.set(_TOLD, "1")

    def _first_failure(self, wait: float) -> JobFailure | None:
        """The failure that another rank has posted, if one has."""
        deadline = time.monotonic() + wait
        while not self._has(_FAILED):
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_SECONDS)
        with self._asking():
            value: dict[str, Any] = json.loads(self._store.get(_FAILED))
        words = "; ".join(value["messages"])
        # That they were asked to stop is no rank's own.
        is_common = value["cause"] == "cancelled" or words.startswith("rank ")
        message = words if is_common else f"rank {value['rank']}: {words}"
        return JobFailure(cause_of(value["cause"]), message, value["help"])

    def _behind(self) -> str:
        """Which ranks have not come to the collective that this one is in, and which give no sign of life."""
        waiting = self._waiting
        if waiting is None:
            return ""
        others = [rank for rank in range(self._place.world) if rank != self._place.rank]
        late = [rank for rank in others if self._posted(f"at/{rank}") < waiting.number]
        before = {rank: self._posted(f"beat/{rank}") for rank in others}
        time.sleep(_SILENT_SECONDS)
        silent = [rank for rank in others if self._posted(f"beat/{rank}") == before[rank]]
        words = [f"ranks that have not come to it: {_listed(late)}" if late else "every rank has come to it"]
        if silent:
            words.append(f"ranks that are stopped, gone or out of reach: {_listed(silent)}")
        return "".join(f"; {word}" for word in words)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        with self._lock:
            self._requests += 1
            self._asked = self._requests
            try:
                yield
            finally:
                self._asked = None

    def _post(self, key: str, count: int) -> None:
        with self._asking():
            self._store.set(key, str(count))

    def _posted(self, key: str) -> int:
        with self._asking():
            return int(self._store.get(key)) if self._store.check([key]) else 0

    def _has(self, key: str) -> bool:
        with self._asking():
            return bool(self._store.check([key]))


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


_LOOK = (
    "standard error and the kernel's log say why a rank is gone or stuck; run again to go on from the last saved step"
)
