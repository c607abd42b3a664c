"""Saved states and metrics are spelled as the native worker spells them, to the byte where a digest depends on it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline_torch_worker import checkpoint
from pipeline_torch_worker.checkpoint import BestWeights, Progress, State, Trained
from pipeline_torch_worker.digest import digest_of, portable_digest
from pipeline_torch_worker.events import Voice
from pipeline_torch_worker.failure import JobFailure
from pipeline_torch_worker.json_text import json_text
from pipeline_torch_worker.precision import ScalerState
from pipeline_torch_worker.validation import Best, Course

# Written by the native worker.
NATIVE = """{
  "version": 3,
  "progress": {
    "step": 140,
    "skipped_steps": 0,
    "total_steps": 150,
    "optimizer_steps": 140,
    "target_tokens": 43217,
    "validation": {"last": null, "best": null, "without_improvement": 0},
    "best_weights": null,
    "loss_scaler": null,
    "computed_by": "cpu (avx512), f32, threads: 2, micro-batches of 8"
  },
  "files": {
    "exp_avg.safetensors": "5bad67379a0fb1739ce425c9721d43cc16ad43de2c9db38985aec3a692b03ad0",
    "exp_avg_sq.safetensors": "21858175f3c065344a01f46a6ca72db6776425357d583d27132ce3fa13ff014b",
    "metrics.jsonl": "dac46588294db79b4fff787b38a75446af8b76476f40da0306fbe4171d0f89f5",
    "trainable.safetensors": "260fa54afade5cdb808259911d95322fc312642e8b13d85de5d3ee26bf5b6fb7"
  },
  "digest": "441c89ee8ded72ca765ab4089e93339f1f333cea9d33b5223ea98093a3c01c2e"
}"""


def test_the_digest_of_a_native_state_is_found_again() -> None:
    value = json.loads(NATIVE)
    progress = Progress.from_json(value["progress"]).to_json()
    assert digest_of(json_text([progress, value["files"]]).encode()) == value["digest"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0.0"),
        (-0.0, "-0.0"),
        (3.0, "3.0"),
        (0.1, "0.1"),
        (8.453508776924949, "8.453508776924949"),
        (1e-5, "0.00001"),
        (1.5e-5, "0.000015"),
        (1e-6, "1e-6"),
        (6.62607015e-34, "6.62607015e-34"),
        (1e15, "1000000000000000.0"),
        (1e16, "1e+16"),
        (1.7976931348623157e308, "1.7976931348623157e+308"),
        (5e-324, "5e-324"),
        (float("nan"), "null"),
        (float("inf"), "null"),
        (np.float32(0.1), "0.1"),
        (np.float32(65536), "65536.0"),
        (np.float32(1e13), "1e+13"),
        (np.float32(1e-6), "0.000001"),
    ],
)
def test_numbers_are_spelled_as_serde_spells_them(number: Any, text: str) -> None:
    assert json_text(number) == text


def test_texts_are_spelled_as_serde_spells_them() -> None:
    assert json_text({"é": ['"\\\n\x01', True, None, 3]}) == '{"é":["\\"\\\\\\n\\u0001",true,null,3]}'


def test_nothing_is_said_after_the_end() -> None:
    said = io.StringIO()
    voice = Voice(said)
    voice.warning("é")
    voice.finished({})
    voice.failed(JobFailure("crashed", "too late"))
    assert [json.loads(line)["event"] for line in said.getvalue().splitlines()] == ["warning", "finished"]
    assert said.getvalue().splitlines()[0] == '{"event":"warning","message":"é"}'


# The first digits of BLAKE3 of so many bytes 0, 1, … 250, 0, …, from its authors' test vectors.
VECTORS = {
    0: "af1349b9f5f9a1a6a0404dea36dcc949",
    1: "2d3adedff11b61f14c886e35afa03673",
    1023: "10108970eeda3eb932baac1428c7a216",
    1024: "42214739f095a406f3fc83deb889744a",
    1025: "d00278ae47eb27b34faecf67b4fe263f",
    2049: "5f4d72f40d7a5f82b15ca2b2e44b1de3",
    8193: "bab6c09cb8ce8cf459261398d2e7aef3",
    102400: "bc3e3d41a1146b069abffad3c0d44860",
}


@pytest.mark.parametrize(("length", "digest"), VECTORS.items())
def test_digests_are_those_of_blake3(length: int, digest: str) -> None:
    data = bytes(number % 251 for number in range(length))
    assert digest_of(data).startswith(digest)
    assert portable_digest(iter([data])).startswith(digest)
    pieces = [data[start : start + 4096] for start in range(0, length, 4096)]
    assert portable_digest(iter(pieces)).startswith(digest)


def state(step: int, best: BestWeights | None = None) -> State:
    course = Course(step, Best(step, 2.5), 1)
    progress = Progress(step, 1, 9, step - 1, 100, course, best, ScalerState(0.1, 2, 1, 0), "a test")
    values = {"b": torch.full((2, 3), float(step)), "a": torch.ones(4)}
    return State(progress, Trained(values, {"exp_avg": dict(values)}), '{"kind":"train"}\n')


def test_a_state_comes_back_as_it_was_and_its_digests_hold(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, state(3), keep=2)
    folder = tmp_path / "step-3"
    loaded = checkpoint.load(folder)
    assert (loaded.progress, loaded.metrics) == (state(3).progress, state(3).metrics)
    assert torch.equal(loaded.trained.values["b"], torch.full((2, 3), 3.0))
    assert loaded.trained.state.keys() == {"exp_avg"}
    file = json.loads((folder / "state.json").read_text())
    assert list(file["files"]) == sorted(file["files"])
    assert {name: digest_of((folder / name).read_bytes()) for name in file["files"]} == file["files"]
    progress = Progress.from_json(file["progress"]).to_json()
    assert digest_of(json_text([progress, file["files"]]).encode()) == file["digest"]


def test_the_newest_states_and_the_best_that_they_name_are_kept(tmp_path: Path) -> None:
    best = checkpoint.save_best(tmp_path, 1, {"a": torch.ones(2)})
    checkpoint.save(tmp_path, state(9), keep=2)
    for step in (1, 2):
        checkpoint.save(tmp_path, state(step, best), keep=2)
    # Step 9 was of another run, or damaged, and is no part of this one.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "step-1", "step-2"]
    other = checkpoint.save_best(tmp_path, 3, {"a": torch.zeros(2)})
    for step in (3, 4):
        checkpoint.save(tmp_path, state(step, other), keep=2)
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["step-3.safetensors"]
    assert torch.equal(checkpoint.load_best(tmp_path, other.step, other.digest)["a"], torch.zeros(2))
