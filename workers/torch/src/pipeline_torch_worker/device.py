"""The device of this rank: what torch calls it, which collectives it has, how much memory was used."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .failure import JobFailure
from .job import DeviceKind

# Only tests set it: a module that stands in for torch_npu on a machine without an NPU.
NPU_MODULE = "PIPELINE_TORCH_WORKER_NPU_MODULE"

# Set where the user's environment does not. HCCL's own limit for making connections (120 s) is short for a large model, whose ranks
# come out of loading at different times. Growing segments keep memory from breaking up where rows have many lengths.
NPU_ENVIRONMENT = {"HCCL_CONNECT_TIMEOUT": "600", "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
CUDA_ENVIRONMENT = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

_COLLECTIVES = {"cpu": "gloo", "cuda": "nccl", "rocm": "nccl", "npu": "hccl"}


@dataclass(frozen=True)
class Device:
    """A device that this process computes on."""

    kind: DeviceKind
    torch: torch.device
    name: str

    @property
    def collectives(self) -> str:
        """The backend of torch.distributed for tensors of this device. (RCCL goes by the name of NCCL.)"""
        stand_in: str = getattr(self.npu_module, "COLLECTIVES", "") if self.kind == "npu" else ""
        return stand_in or _COLLECTIVES[self.kind]

    @property
    def npu_module(self) -> ModuleType | None:
        """torch_npu, on an NPU."""
        return npu_module() if self.kind == "npu" else None

    @property
    def _counters(self) -> Any:
        return {"cuda": torch.cuda, "rocm": torch.cuda, "npu": getattr(torch, "npu", None)}.get(self.kind)

    def peak_memory_bytes(self) -> int:
        """The most memory that tensors have had on the device; on the processor, that the process has had resident."""
        counted = int(self._counters.max_memory_allocated(self.torch)) if self._counters else 0
        return counted or peak_resident_bytes()

    def synchronize(self) -> None:
        """Waits for what the device has been given to do."""
        if self._counters:
            self._counters.synchronize(self.torch)


def open_device(kind: DeviceKind, local_rank: int, threads: int) -> Device:
    """Takes the device of a local rank, and so many processor threads."""
    torch.set_num_threads(max(1, threads))
    if kind == "cpu":
        return Device(kind, torch.device("cpu"), "cpu")
    environment = NPU_ENVIRONMENT if kind == "npu" else CUDA_ENVIRONMENT
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    if kind == "npu":
        npu_module()
        counters: Any = torch.npu  # type: ignore[attr-defined]
    else:
        _check_build(kind)
        counters = torch.cuda
    if not counters.is_available():
        help_ = f"look at `pipeline devices doctor`: torch {torch.__version__} sees no {kind} device"
        raise JobFailure("machine", f"no {kind} device can be used", help_)
    count = counters.device_count()
    if local_rank >= count:
        message = f"rank {local_rank} of this node has no device of its own: torch sees {count} of kind {kind}"
        raise JobFailure("machine", message, "start as many ranks as there are devices")
    counters.set_device(local_rank)
    device = torch.device("npu" if kind == "npu" else "cuda", local_rank)
    return Device(kind, device, counters.get_device_name(local_rank))


def let_the_watch_come_first(device: Device, seconds: float) -> None:
    """Gives HCCL more time for a collective than the watch gives it, which can say who has not come; before HCCL starts.

    It counts in 68 seconds, and takes 1836 by default.
    """
    if device.collectives == "hccl":
        most = max(1836, 68 * (int(seconds) // 68 + 2))
        os.environ.setdefault("HCCL_EXEC_TIMEOUT", str(most))


def _check_build(kind: DeviceKind) -> None:
    is_rocm = torch.version.hip is not None
    if (kind == "rocm") != is_rocm:
        build = "ROCm" if is_rocm else "CUDA" if torch.version.cuda else "the processor alone"
        message = f"torch {torch.__version__} is built for {build}, and the job asks for {kind}"
        raise JobFailure(
            "machine", message, "install the wheel of torch for this device: the worker's README has the lines"
        )


@functools.cache
def npu_module() -> ModuleType:
    """torch_npu, imported only here: where CANN is not there its import fails, and can take the process down with it."""
    name = os.environ.get(NPU_MODULE, "torch_npu")
    if name == "torch_npu":
        _probe_npu()
    return importlib.import_module(name)


def _probe_npu() -> None:
    """Imports torch_npu in a child process first, whose end can be survived."""
    program = "import torch, torch_npu; print(torch.npu.device_count())"
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False
    )
    if child.returncode != 0:
        words = child.stderr.strip().splitlines()[-1:] or [f"it ended with code {child.returncode}"]
        help_ = (
            "install the torch_npu that goes with this torch and this CANN (the worker's README has the matrix), and source CANN's "
            "set_env.sh before the run"
        )
        raise JobFailure("machine", f"torch_npu cannot be imported: {words[0]}", help_)


def peak_resident_bytes() -> int:
    """The most memory that this process has had resident, as the kernel counts it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        import resource

        # In bytes on macOS, where there is no /proc.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
