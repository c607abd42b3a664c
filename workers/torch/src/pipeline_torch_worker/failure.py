"""Why a job ends without a result, in the words of the worker protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

Cause = Literal[
    "bad_data",
    "bad_parameters",
    "machine",
    "out_of_memory",
    "device_out_of_memory",
    "device_lost",
    "disk_full",
    "numeric",
    "cancelled",
    "timeout",
    "crashed",
    "internal",
]


@dataclass
class JobFailure(Exception):
    """A failure with its kind, its words, outermost first, and what to do about it."""

    cause: Cause
    message: str
    help: str | None = None

    def __str__(self) -> str:
        return self.message

    def to_json(self) -> dict[str, Any]:
        """As the fields of a `failed` event."""
        return {"cause": self.cause, "messages": messages(self), "help": self.help}


def messages(error: BaseException) -> list[str]:
    """The words of an error and of what it came from, outermost first."""
    told: list[str] = []
    at: BaseException | None = error
    while at is not None:
        words = str(at) if isinstance(at, JobFailure) else f"{type(at).__name__}: {at}".strip(": ")
        told.append(words)
        at = at.__cause__
    return told


def failure_of(error: BaseException) -> JobFailure:
    """The failure that an exception stands for."""
    if isinstance(error, JobFailure):
        return error
    cause, advice = _kind_of(error)
    failure = JobFailure(cause, "the torch worker failed", advice)
    failure.__cause__ = error
    return failure


def _kind_of(error: BaseException) -> tuple[Cause, str | None]:
    text = str(error)
    # By name: torch is not imported here, and torch_npu has its own class of the same name.
    if type(error).__name__ == "OutOfMemoryError" or "out of memory" in text.lower():
        help_ = "lower micro_batch_size, turn activation checkpointing on, or take more devices with `parallel: fsdp2`"
        return ("device_out_of_memory", help_)
    if isinstance(error, MemoryError):
        return ("out_of_memory", "lower micro_batch_size, or run on a machine with more memory")
    if isinstance(error, OSError) and error.errno == 28:
        return ("disk_full", "free space where the pipeline's home lies")
    if isinstance(error, OSError):
        return ("machine", None)
    if "device-side assert" in text or "device lost" in text.lower() or "NPU function error" in text:
        return ("device_lost", "look at the device's own log; run again to go on from the last saved step")
    return ("internal", "this is a defect of the torch worker; standard error has the place")


def cause_of(text: str) -> Cause:
    """A cause by its name; `internal` for one that is not known."""
    return text if text in get_args(Cause) else "internal"  # type: ignore[return-value]
