"""What training leaves for the stage process: the adapter or the model, the figures, and a summary."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PretrainedConfig

from . import __version__
from .checkpoint import Progress, Tensors
from .device import Device
from .failure import JobFailure
from .json_text import json_text
from .parallel import Ranks
from .weights import INDEX_FILE, weight_files


def write_model(values: Tensors, base: Path, config: PretrainedConfig, folder: Path) -> None:
    """Writes the trained weights as the base's files have them: in their types, in the same shards, with what lies beside them."""
    folder.mkdir()
    for path in sorted(base.iterdir()):
        if (
            path.is_file()
            and not path.name.endswith((".safetensors", ".bin", ".pth", ".pt"))
            and path.name != INDEX_FILE
        ):
            shutil.copyfile(path, folder / path.name)
    # A file may hold the head of a tied model once more: a copy that the training left behind would contradict it.
    left_out = "lm_head.weight" if config.tie_word_embeddings else None
    where: dict[str, str] = {}
    total = 0
    for path in weight_files(base):
        with safe_open(path, framework="pt") as original:
            names = [name for name in original.keys() if name != left_out]  # noqa: SIM118 - not a dict
            stored = {name: original.get_tensor(name) for name in names}
        tensors = {name: values[name].to(kept.dtype) if name in values else kept for name, kept in stored.items()}
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
        where.update(dict.fromkeys(tensors, path.name))
        total += sum(tensor.nbytes for tensor in tensors.values())
    if (base / INDEX_FILE).exists():
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def check_names(base: Path, trained: Iterable[str]) -> None:
    """Fails where a trained tensor has no place in the files of the base: it would be left out of the result."""
    there: set[str] = set()
    for path in weight_files(base):
        with safe_open(path, framework="pt") as original:
            there.update(original.keys())
    missing = sorted(set(trained) - there)
    if missing:
        message = f"the model's files have no tensor `{missing[0]}`, which transformers trains"
        raise JobFailure("bad_parameters", message, "save the model anew with the names that transformers gives")


def write_summary(folder: Path, how: dict[str, Any], progress: Progress | None = None) -> None:
    """What computed it and the memory that it took; of a training run, where it ended."""
    value = how if progress is None else {"progress": progress.to_json(), **how}
    # The scale of losses is an f32 of numpy's in it.
    (folder / "summary.json").write_text(json.dumps(value, indent=2, default=float) + "\n")


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Writes JSON Lines."""
    path.write_text("".join(f"{json_text(line)}\n" for line in lines), encoding="utf-8")


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
