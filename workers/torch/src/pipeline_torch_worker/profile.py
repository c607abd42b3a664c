"""A trace of a few steps, by the device's own profiler, in the run's folder."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from .device import Device

# The first steps allocate and compile; few are enough to see where the time goes, and traces are large.
SKIPPED, WARMED_UP, RECORDED = 1, 1, 3


class Profiler(Protocol):
    """What is told that a step is over."""

    def step(self) -> None:
        """A step is over."""


class _NoProfiler:
    def step(self) -> None:
        """Nothing is recorded."""


def profiling(wanted: bool, device: Device, rank: int, folder: Path) -> AbstractContextManager[Profiler]:
    """Records steps 3 to 5 of this process into `folder/torch-rank-<n>.trace.json`; on an NPU into a folder of torch_npu's own.

    `msprof --application="python -m pipeline_torch_worker JOB"` records more of an NPU: it needs no help from here.
    """
    if not wanted:
        return nullcontext(_NoProfiler())
    if device.kind == "npu" and hasattr(device.npu_module, "profiler"):
        return _of_npu(device.npu_module, rank, folder)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.kind in ("cuda", "rocm"):
        activities.append(torch.profiler.ProfilerActivity.CUDA)

    def write(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(folder / f"torch-rank-{rank}.trace.json"))

    schedule = torch.profiler.schedule(wait=SKIPPED, warmup=WARMED_UP, active=RECORDED, repeat=1)
    return torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=write, record_shapes=True)


def _of_npu(module: Any, rank: int, folder: Path) -> AbstractContextManager[Profiler]:
    profiler = module.profiler
    activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU]
    made: AbstractContextManager[Profiler] = profiler.profile(
        activities=activities,
        schedule=profiler.schedule(wait=SKIPPED, warmup=WARMED_UP, active=RECORDED, repeat=1, skip_first=0),
        on_trace_ready=profiler.tensorboard_trace_handler(str(folder), worker_name=f"rank-{rank}"),
    )
    return made
