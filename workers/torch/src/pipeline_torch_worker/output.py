"""What is left for the stage process: lines of results, and what computed them."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from . import __version__
from .device import Device
from .parallel import Ranks


def write_summary(folder: Path, how: dict[str, Any]) -> None:
    """What computed it and the memory that it took."""
    (folder / "summary.json").write_text(json.dumps(how, indent=2) + "\n")


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Writes JSON Lines."""
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def how_computed(device: Device, ranks: Ranks, attention: str) -> dict[str, Any]:
    """What computed a result, and the most memory that each rank had. Every rank has to take part."""
    peak_memory = ranks.gather(device.peak_memory_bytes(), "gather the memory used")
    return {
        "backend": "torch",
        "device": device.kind,
        "device_name": device.name,
        "ranks": ranks.world,
        "attention": attention,
        "peak_memory_bytes": [int(peak) for peak in peak_memory],
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of what computes."""
    found = {"pipeline_torch_worker": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("transformers", "peft", "torch_npu"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
