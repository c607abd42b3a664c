"""Values of what is trained and the optimizer's state of them, as safetensors files that any backend and number of ranks reads.

A file holds one set of values, `<set>.safetensors`. Several ranks write a set in shards, `<set>-00001-of-00002.safetensors`, each
with some of the tensors, whole. Which files make a saved state, and whether they are whole, is the stage process's business.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .failure import JobFailure
from .parallel import Ranks

# The set of the trained values.
VALUES = "trainable"
# Sets of optimizer state that every saved state has a file of, which is empty where the optimizer has no such set.
USUAL_SETS = ("exp_avg", "exp_avg_sq")
ENDING = ".safetensors"

Tensors = dict[str, torch.Tensor]


def write_set(
    folder: Path, name: str, sizes: Mapping[str, int], value: Callable[[str, bool], torch.Tensor | None], ranks: Ranks
) -> list[str]:
    """Writes this rank's tensors of a set; the names of all ranks' files.

    `sizes` has the tensors of the set. `value` brings one together, in which every rank has to take part, and returns it where this
    rank is to write it.
    """
    owners = _owners(sizes, ranks.world)
    ours: Tensors = {}
    for tensor in sorted(sizes):
        found = value(tensor, owners[tensor] == ranks.rank)
        if found is not None:
            ours[tensor] = found.contiguous()
    files = [name + ENDING]
    if ranks.world > 1:
        files = [f"{name}-{shard:05}-of-{ranks.world:05}{ENDING}" for shard in range(1, ranks.world + 1)]
    path = folder / files[ranks.rank]
    save_file(ours, path)
    _flush(path)
    return files


def _owners(sizes: Mapping[str, int], world: int) -> dict[str, int]:
    """The rank that writes each tensor: the largest first, each to the one that has the least so far."""
    loads = [0] * world
    owners = {}
    for tensor in sorted(sizes, key=lambda tensor: (-sizes[tensor], tensor)):
        owners[tensor] = loads.index(min(loads))
        loads[owners[tensor]] += sizes[tensor]
    return owners


class SavedTensors:
    """The tensors of a saved state, read one at a time."""

    def __init__(self, files: Mapping[str, Sequence[str]]) -> None:
        self._files = files
        self._open = ExitStack()
        self._found: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> SavedTensors:
        for set_, paths in self._files.items():
            for path in paths:
                file = self._open.enter_context(safe_open(path, framework="pt"))
                for tensor in file.keys():  # noqa: SIM118 - not a dict
                    self._found.setdefault(tensor, {})[set_] = file
        return self

    def __exit__(self, *ended: object) -> None:
        self._open.close()

    def sets(self) -> dict[str, set[str]]:
        """The sets that there are of each tensor."""
        return {tensor: set(found) for tensor, found in self._found.items()}

    def shape(self, tensor: str, set_: str) -> list[int]:
        """The shape of a tensor."""
        shape: list[int] = self._found[tensor][set_].get_slice(tensor).get_shape()
        return shape

    def read(self, tensor: str, set_: str) -> torch.Tensor:
        """A tensor of a set."""
        try:
            found: torch.Tensor = self._found[tensor][set_].get_tensor(tensor)
        except Exception as error:
            raise JobFailure("machine", f"cannot read the saved `{tensor}`") from error
        return found


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
