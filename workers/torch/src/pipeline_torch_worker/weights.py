"""The tensors of a checkpoint's files, whole or in part, without reading more of them than is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from .architecture import names_in_model
from .failure import JobFailure

INDEX_FILE = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """The files of weights: those that the index names, or the only one."""
    index = folder / INDEX_FILE
    if not index.exists():
        return [folder / "model.safetensors"]
    names: dict[str, str] = json.loads(index.read_text())["weight_map"]
    return sorted(folder / name for name in set(names.values()))


def names_in_files(folder: Path) -> set[str]:
    """The names of all tensors in the files of weights."""
    names: set[str] = set()
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as opened:
            names.update(opened.keys())
    return names


def check_names(there: Set[str], trained: Iterable[str]) -> None:
    """Fails where a trained tensor has no place in the files of the base: it would be left out of the result."""
    missing = sorted(set(trained) - there)
    if missing:
        message = f"the model's files have no tensor `{missing[0]}`, which transformers trains"
        raise JobFailure("bad_parameters", message, "save the model anew with the names that transformers gives")


class WeightFiles:
    """The tensors of a checkpoint, by the names that they have in the model."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        stored: dict[str, Any] = {}
        self.bytes_read = 0
        for path in weight_files(folder):
            with safe_open(path, framework="pt") as opened:
                # A slice keeps its file mapped.
                stored.update({name: opened.get_slice(name) for name in opened.keys()})  # noqa: SIM118 - not a dict
        named = names_in_model(model, stored)
        self._slices = {name: stored[in_file] for in_file, name in named.items() if name is not None}
        self._converted = [in_file for in_file, name in named.items() if name is None]

    def __contains__(self, name: str) -> bool:
        return name in self._slices

    def differ_from(self, model: PreTrainedModel) -> str | None:
        """Why the tensors of the files are not those of the model, one to one; `None` where they are."""
        if self._converted:
            return f"transformers makes another tensor of `{self._converted[0]}` and others"
        tied = _tied_names(model)
        for name, tensor in model.state_dict().items():
            if name not in self._slices and name in tied:
                continue
            if name not in self._slices:
                return f"its files have no `{name}`"
            if self._slices[name].get_shape() != list(tensor.shape):
                return f"`{name}` of its files has another shape than transformers gives it"
        # transformers keeps some modules in f32 whatever the dtype is.
        if getattr(model, "_keep_in_fp32_modules", None) or getattr(model, "_keep_in_fp32_modules_strict", None):
            return "transformers keeps some of its modules in f32"
        return None

    def read(self, name: str, dimension: int, start: int, end: int) -> torch.Tensor:
        """Part of a tensor: the places from `start` to `end` of a dimension."""
        part: torch.Tensor = self._slices[name][(slice(None),) * dimension + (slice(start, end),)]
        self.bytes_read += part.nbytes
        return part

    def read_whole(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        whole: torch.Tensor = self._slices[name][...]
        self.bytes_read += whole.nbytes
        return whole


def _tied_names(model: PreTrainedModel) -> set[str]:
    """All names of tensors that have more than one."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name for several in names.values() if len(several) > 1 for name in several[1:]}
