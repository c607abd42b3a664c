"""Jobs made of the repository's golden cases, and running them."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pipeline_torch_worker.__main__ import run
from pipeline_torch_worker.events import Voice

PACKAGE = Path(__file__).parents[1]
GOLDEN = PACKAGE.parents[1] / "tests" / "golden"

takes_minutes = pytest.mark.skipif(os.environ.get("PIPELINE_TESTS") != "all", reason="minutes: PIPELINE_TESTS=all")
"""A test of what compilers do, which `scripts/check-release` runs."""

TokenRow = tuple[list[int], list[int], list[int]]
"""Ids, labels, lengths of documents; the rest of the row is padding."""


def golden_cases() -> list[tuple[str, str]]:
    """Family and variant of every golden training run but those of what only the native backend computes."""
    native_only = {"neftune_noise_alpha", "learning_rate_ratio"}
    found = sorted((path.parents[2].name, path.parent.name) for path in GOLDEN.glob("*/lora/*/steps.json"))
    return [case for case in found if not native_only & golden_steps(*case).keys()]


def golden_steps(family: str, variant: str) -> dict[str, Any]:
    steps: dict[str, Any] = json.loads((GOLDEN / family / "lora" / variant / "steps.json").read_text())
    return steps


def golden_rows(family: str, variant: str) -> list[TokenRow]:
    """The rows of a golden run, in the order in which its steps take them."""
    folder = GOLDEN / family / "lora" / variant
    batches = load_file(folder / "batches.safetensors")
    steps = golden_steps(family, variant)
    rows = []
    for step in range(len(steps["steps"])):
        for micro in range(steps["gradient_accumulation_steps"]):
            fields = ("input_ids", "labels", "document_lengths")
            ids, labels, lengths = (batches[f"step{step}.micro{micro}.{name}"].flatten().tolist() for name in fields)
            rows.append((ids, labels, lengths))
    return rows


def adapter_folder(family: str, variant: str, folder: Path) -> Path:
    """The adapter that a golden run begins with, as a PEFT folder."""
    case = GOLDEN / family / "lora" / variant
    folder.mkdir(parents=True)
    shutil.copyfile(case / "adapter_init.safetensors", folder / "adapter_model.safetensors")
    shutil.copyfile(case / "adapter" / "adapter_config.json", folder / "adapter_config.json")
    return folder


def train_job(root: Path, family: str, variant: str, **changes: Any) -> dict[str, Any]:
    """The job of a golden run, with changes; folders under `root`."""
    steps = golden_steps(family, variant)
    for name in ("output", "run"):
        (root / name).mkdir(parents=True, exist_ok=True)
    optimizer = {name: value for name, value in steps["optimizer"].items() if name != "lr"}
    adapter = root / "adapter"
    job = {
        "protocol": 1,
        "task": "train",
        "device": "cpu",
        "dtype": "f32",
        "threads": 1,
        "model": str(GOLDEN / family),
        "quantize": None,
        "method": "lora",
        "adapter": str(adapter if adapter.exists() else adapter_folder(family, variant, adapter)),
        "dropout": steps["lora"].get("lora_dropout", 0.0),
        "parallel": "ddp",
        "attention": "auto",
        "compile": "none",
        "packed": True,
        "label_smoothing": 0.0,
        "distillation": None,
        "optimizer": optimizer,
        "clip_grad_norm": steps["clip_grad_norm"],
        "loss_scale": None,
        "activation_checkpointing": False,
        "seed": 0,
        "run_folder": str(root / "run"),
        "profile": False,
        "watchdog_seconds": 60.0,
    }
    return {**job, **changes}


def serve_job(family: str, **changes: Any) -> dict[str, Any]:
    """The job of a model whose logits are asked for."""
    job = {"protocol": 1, "task": "serve", "device": "cpu", "dtype": "f32", "threads": 1}
    return {**job, "model": str(GOLDEN / family), "quantize": None, **changes}


def infer_job(family: str, **changes: Any) -> dict[str, Any]:
    """The job of a model that is scored and completes prompts."""
    job = {"protocol": 1, "task": "infer", "device": "cpu", "dtype": "f32", "threads": 1}
    return {**job, "model": str(GOLDEN / family), "quantize": None, "widen": False, "adapter": None, **changes}


@dataclass
class Step:
    """The rows of an optimizer step, by their numbers, and its learning rate."""

    rows: list[int]
    rate: float


def golden_plan(family: str, variant: str) -> list[Step]:
    """The steps of a golden run."""
    steps = golden_steps(family, variant)
    per_step = steps["gradient_accumulation_steps"]
    plan = enumerate(steps["steps"])
    return [Step(list(range(index * per_step, (index + 1) * per_step)), step["lr"]) for index, step in plan]


class Script:
    """Requests as the stage process sends them, all at once: rows go around among the ranks."""

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks
        self.data = b""

    def request(self, name: str, payload: bytes = b"", **fields: Any) -> Script:
        self.data += json.dumps({"request": name, **fields, "bytes": len(payload)}).encode() + b"\n" + payload
        return self

    def rows(self, name: str, rows: dict[int, TokenRow], at_once: int = 1, **fields: Any) -> Script:
        """A request with rows by their numbers, of which each rank computes some at once."""
        numbers, payload, ranks = list(rows), b"", []
        for rank in range(self.ranks):
            ours, counts = numbers[rank :: self.ranks], []
            for start in range(0, len(ours), at_once):
                found, batch = encoded([(number, rows[number]) for number in ours[start : start + at_once]])
                counts.append(found)
                payload += batch
            ranks.append(counts)
        return self.request(name, payload, ranks=ranks, **fields)

    def step(self, rows: list[TokenRow], step: Step, at_once: int = 1) -> Script:
        of_step = {number: rows[number] for number in step.rows}
        targets = sum(len(_targets(row)[0]) for row in of_step.values())
        return self.rows("accumulate", of_step, at_once, weight=targets).request("step", learning_rate=step.rate)

    def steps(self, rows: list[TokenRow], plan: list[Step], at_once: int = 1) -> Script:
        for step in plan:
            self.step(rows, step, at_once)
        return self

    def score(self, rows: list[TokenRow], at_once: int = 2) -> Script:
        return self.rows("score_rows", dict(enumerate(rows)), at_once)

    def generate(self, prompts: list[dict[str, Any]], **changes: Any) -> Script:
        options: dict[str, Any] = {
            "temperature": 0.0,
            "top_k": None,
            "top_p": None,
            "min_p": None,
            "repetition_penalty": None,
        }
        options |= {"max_new_tokens": 24, "min_new_tokens": 0, "stop_ids": [], **changes}
        ours = [[{"row": 0, **prompt} for prompt in prompts[rank :: self.ranks]] for rank in range(self.ranks)]
        return self.request("generate", prompts=ours, options=options)

    def begin_batch(
        self, batch: int, prompts: list[list[int]], adapter: str | None = None, each: bool = False
    ) -> Script:
        return self.request("begin_batch", batch=batch, adapter=adapter, prompts=prompts, each=each)

    def next_tokens(self, batch: int, rows: list[int], tokens: list[list[int]], each: bool = False) -> Script:
        return self.request("next_tokens", batch=batch, rows=rows, tokens=tokens, each=each)

    def load_adapter(self, adapter: str, folder: Path) -> Script:
        return self.request("load_adapter", adapter=adapter, folder=str(folder))

    def save(self, folder: Path, state: bool = False) -> Script:
        folder.mkdir(parents=True, exist_ok=True)
        return self.request("save", folder=str(folder), state=state)

    def restore(self, folder: Path, steps: int, scaler: dict[str, Any] | None = None) -> Script:
        files: dict[str, list[str]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            files.setdefault(path.name.split("-0")[0].removesuffix(".safetensors"), []).append(str(path))
        return self.request("restore", files=files, optimizer_steps=steps, loss_scaler=scaler)

    def close(self) -> bytes:
        return self.request("close").data


def _targets(row: TokenRow) -> tuple[list[int], list[int]]:
    """Where a row has targets, and which."""
    _, labels, lengths = row
    places, start = [], 0
    for length in lengths:
        places += [at for at in range(start, start + length - 1) if labels[at + 1] != -100]
        start += length
    return places, [labels[at + 1] for at in places]


def encoded(rows: list[tuple[int, TokenRow]]) -> tuple[dict[str, Any], bytes]:
    ids: list[int] = []
    lengths, numbers, places, targets = list(ids), list(ids), list(ids), list(ids)
    for number, row in rows:
        before = len(ids)
        ids += row[0][: sum(row[2])]
        lengths += row[2]
        numbers += [number] * len(row[2])
        of_row = _targets(row)
        places += [before + at for at in of_row[0]]
        targets += of_row[1]
    counts = {
        "tokens": len(ids),
        "documents": len(lengths),
        "targets": len(targets),
        "weighted": False,
        "responses": False,
    }
    arrays = [np.array(ids, "<u4"), np.array(lengths, "<u4"), np.array(numbers, "<u8")]
    arrays += [np.array(places, "<u4"), np.array(targets, "<u4")]
    return counts, b"".join(array.tobytes() for array in arrays)


def golden_script(family: str, variant: str, root: Path, ranks: int = 1, at_once: int = 1) -> bytes:
    """A whole golden run, whose values are saved."""
    script = Script(ranks).steps(golden_rows(family, variant), golden_plan(family, variant), at_once)
    return script.save(root / "output" / "saved").close()


class Ran:
    """What a job said and left."""

    def __init__(self, code: int, said: bytes, root: Path, errors: str = "") -> None:
        self.code = code
        self.errors = errors
        self.lines: list[dict[str, Any]] = []
        # The logits that requests were answered with.
        self.logits: list[Any] = []
        source = io.BytesIO(said)
        while line := source.readline():
            self.lines.append(json.loads(line))
            if "bytes" in self.lines[-1]:
                values = np.frombuffer(source.read(self.lines[-1]["bytes"]), "<f4")
                self.logits.append(torch.tensor(values.reshape(self.lines[-1]["answer"]["shape"])))
        self.events = [line for line in self.lines if "event" in line]
        self.output = root / "output"

    def of(self, event: str) -> list[dict[str, Any]]:
        return [said for said in self.events if said["event"] == event]

    @property
    def failed(self) -> dict[str, Any]:
        assert self.code == 1, self.events
        (failed,) = self.of("failed")
        assert self.events[-1] is failed
        return failed

    @property
    def answers(self) -> list[Any]:
        """The answers to requests, after what the worker says of itself."""
        return [said["answer"] for said in self.lines if "answer" in said][1:]

    @property
    def how(self) -> dict[str, Any]:
        """What the worker says of itself."""
        found: dict[str, Any] = next(said["answer"] for said in self.lines if "answer" in said)
        return found

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The reports of steps."""
        return [answer["done"] for answer in self.answers if isinstance(answer, dict) and "done" in answer]

    @property
    def results(self) -> list[list[Any]]:
        """What each request to score rows or to complete prompts gave, those of all ranks in their order."""
        of_ranks = [answer["ranks"] for answer in self.answers if isinstance(answer, dict) and "ranks" in answer]
        longest = [max(map(len, ranks)) for ranks in of_ranks]
        return [
            [of_rank[index] for index in range(most) for of_rank in ranks if index < len(of_rank)]
            for most, ranks in zip(longest, of_ranks, strict=True)
        ]

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps]

    @property
    def trained(self) -> dict[str, torch.Tensor]:
        """The values that were saved last."""
        found: dict[str, torch.Tensor] = {}
        for path in (self.output / "saved").glob("trainable*"):
            found.update(load_file(path))
        return found

    def done(self) -> Ran:
        assert self.code == 0, (self.events[-1:], self.errors)
        assert self.events[-1]["event"] == "finished"
        return self


def write_job(root: Path, job: dict[str, Any]) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    path = root / "job.json"
    path.write_text(json.dumps(job))
    return path


class _Held(io.BytesIO):
    """Requests of a stage process that stays when it has sent them."""

    def readline(self, size: int | None = -1, /) -> bytes:
        return super().readline(size) or self._wait()

    def _wait(self) -> bytes:
        threading.Event().wait()
        return b""


def run_here(root: Path, job: dict[str, Any], requests: bytes = b"") -> Ran:
    """Runs a job in this process."""
    said = io.BytesIO()
    code = run(write_job(root, job), Voice(said), _Held(requests))
    return Ran(code, said.getvalue(), root)


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(PACKAGE / "src"), str(PACKAGE / "tests"), *sys.path])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The greatest difference of a tensor, as a share of the greatest value of it."""
    assert found.keys() == expected.keys()
    shares = [
        float((found[name].float() - tensor.float()).abs().max() / tensor.float().abs().max().clamp_min(1e-30))
        for name, tensor in expected.items()
    ]
    return max(shares)
