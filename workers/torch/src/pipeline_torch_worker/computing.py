"""What computes: device, ranks and versions, which are recorded with a result."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from . import __version__
from .device import Device
from .parallel import Ranks


def describe(device: Device, ranks: Ranks, attention: str) -> dict[str, Any]:
    """What the worker says of itself once a model is loaded."""
    return {
        "backend": "torch",
        "device": device.kind,
        "device_name": device.name,
        "ranks": ranks.world,
        "attention": attention,
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
