"""Working state: what an interrupted run continues from, in the form that the native worker writes and reads.

Each saved step is a folder `step-<n>` with the trained tensors and, a file for each set of values, the optimizer's state of them as
safetensors under their PEFT or Hub names, the metrics up to that step, and `state.json`, which holds the digests of the others and
is what makes the folder count. A folder appears under its name only when it is whole. The weights of the best step lie beside
them, as `best/step-<n>.safetensors`.

Whether a saved step may be gone on from, and whether it is whole, the stage process has found out before it names it in the job.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from .digest import digest_of, digest_of_file
from .failure import JobFailure
from .json_text import json_text
from .precision import ScalerState
from .validation import Course

VERSION = 3
STATE_FILE = "state.json"
METRICS_FILE = "metrics.jsonl"
VALUES = "trainable.safetensors"
# Sets of optimizer state that every saved step has a file of, which is empty where the optimizer has no such set.
USUAL_SETS = ("exp_avg", "exp_avg_sq")
TENSORS = ".safetensors"
BEST_FOLDER = "best"

Tensors = dict[str, torch.Tensor]


@dataclass
class BestWeights:
    """The weights of a step, kept apart from the saved steps."""

    step: int
    digest: str


@dataclass
class Progress:
    """Where a run stands. The order of the fields is that of the file, whose digest depends on it."""

    step: int
    skipped_steps: int
    total_steps: int
    optimizer_steps: int
    target_tokens: int
    validation: Course
    best_weights: BestWeights | None
    loss_scaler: ScalerState | None
    computed_by: str

    @classmethod
    def fresh(cls, total_steps: int, computed_by: str) -> Progress:
        """A run before its first step."""
        return cls(0, 0, total_steps, 0, 0, Course(), None, None, computed_by)

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file."""
        value = asdict(self)
        if self.loss_scaler is not None:
            # It is an f32 there, whose shortest form is another than that of the same number as an f64.
            value["loss_scaler"]["scale"] = np.float32(self.loss_scaler.scale)
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Progress:
        """Reads it from the file."""
        best, scaler = value["best_weights"], value["loss_scaler"]
        return cls(
            **{
                **value,
                "validation": Course.from_json(value["validation"]),
                "best_weights": None if best is None else BestWeights(**best),
                "loss_scaler": None if scaler is None else ScalerState(**scaler),
            }
        )


@dataclass
class Trained:
    """What is trained, whole and in f32 on the CPU, with the sets of tensors that the optimizer keeps of it, by their names."""

    values: Tensors
    state: dict[str, Tensors] = field(default_factory=dict)


@dataclass
class State:
    """A saved run, or one that is to be saved."""

    progress: Progress
    trained: Trained
    metrics: str


def save(working: Path, state: State, keep: int) -> None:
    """Saves a state under `working` and removes all but the `keep` newest up to it.

    Later ones, which were damaged or passed over, are no part of this run.
    """
    unfinished = working / "unfinished"
    _remove(unfinished)
    unfinished.mkdir(parents=True)
    trained = state.trained
    files = {METRICS_FILE: _write(unfinished / METRICS_FILE, state.metrics.encode())}
    sets = {set_: trained.state.get(set_, {}) for set_ in {*USUAL_SETS, *trained.state}}
    for name, tensors in {
        VALUES: trained.values,
        **{set_ + TENSORS: tensors for set_, tensors in sets.items()},
    }.items():
        files[name] = _write_tensors(unfinished / name, tensors)
    files = dict(sorted(files.items()))
    progress = state.progress.to_json()
    digest = digest_of(json_text([progress, files]).encode())
    text = json_text({"version": VERSION, "progress": progress, "files": files, "digest": digest})
    _write(unfinished / STATE_FILE, text.encode())
    _flush(unfinished)

    whole = working / f"step-{state.progress.step}"
    _remove(whole)
    unfinished.rename(whole)
    _flush(working)
    saved = _saved_steps(working)
    until_now = [folder for step, folder in saved if step <= state.progress.step]
    later = [folder for step, folder in saved if step > state.progress.step]
    for folder in until_now[:-keep] + later:
        _remove(folder)
    _remove_unnamed_best(working)


def load(folder: Path) -> State:
    """Reads a saved step."""
    try:
        progress = _read_progress(folder)
        values = load_file(folder / VALUES)
        sets = [path for path in sorted(folder.glob("*" + TENSORS)) if path.name != VALUES]
        state = {path.name.removesuffix(TENSORS): tensors for path in sets if (tensors := load_file(path))}
        metrics = (folder / METRICS_FILE).read_text(encoding="utf-8")
    except Exception as error:
        raise JobFailure("machine", f"cannot read the saved step `{folder}`") from error
    return State(progress, Trained(values, state), metrics)


def save_best(working: Path, step: int, values: Tensors) -> BestWeights:
    """Keeps the values of the best step; the file is there whole or not at all."""
    folder = working / BEST_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / "unfinished"
    _remove(unfinished)
    digest = _write_tensors(unfinished, values)
    unfinished.replace(_best_file(working, step))
    _flush(folder)
    return BestWeights(step, digest)


def load_best(working: Path, step: int, digest: str | None) -> Tensors:
    """The values of the best step; they must be those of a digest where one is given."""
    path = _best_file(working, step)
    if digest is not None and digest_of_file(path) != digest:
        raise JobFailure("machine", f"`{path}` is damaged: it is not what was saved")
    return dict(load_file(path))


def _saved_steps(working: Path) -> list[tuple[int, Path]]:
    """The folders of saved steps, the oldest first."""
    names = [(path.name.removeprefix("step-"), path) for path in working.glob("step-*")]
    return sorted((int(number), path) for number, path in names if number.isdecimal())


def _read_progress(folder: Path) -> Progress:
    value = json.loads((folder / STATE_FILE).read_bytes())
    if value["version"] != VERSION:
        raise ValueError(f"it is of version {value['version']}, not {VERSION}")
    return Progress.from_json(value["progress"])


def _best_file(working: Path, step: int) -> Path:
    return working / BEST_FOLDER / f"step-{step}.safetensors"


def _remove_unnamed_best(working: Path) -> None:
    """Removes the best weights that no saved step names. A step that cannot be read names none."""
    named = set()
    for _, folder in _saved_steps(working):
        try:
            best = _read_progress(folder).best_weights
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if best is not None:
            named.add(_best_file(working, best.step))
    for path in (working / BEST_FOLDER).glob("*"):
        if path not in named:
            _remove(path)


def _write_tensors(path: Path, tensors: Tensors) -> str:
    save_file({name: tensors[name].contiguous() for name in sorted(tensors)}, path)
    _flush(path)
    return digest_of_file(path)


def _write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    _flush(path)
    return digest_of(data)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
