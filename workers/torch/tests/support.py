"""Jobs made of the repository's golden cases, and running them."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from pipeline_torch_worker.__main__ import run
from pipeline_torch_worker.events import Voice

PACKAGE = Path(__file__).parents[1]
GOLDEN = PACKAGE.parents[1] / "tests" / "golden"

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


def write_rows(path: Path, rows: list[TokenRow], packed: bool = True, per_part: int = 3) -> dict[str, Any]:
    """Writes rows as the tokenize and pack stages do, in several parts; as a job names them."""
    path.mkdir(parents=True, exist_ok=True)
    types = [pa.list_(pa.uint32()), pa.list_(pa.int32()), pa.list_(pa.uint32())]
    names = ["input_ids", "labels", "document_lengths"][: 3 if packed else 2]
    parts = []
    for number, start in enumerate(range(0, len(rows), per_part)):
        part = path / f"part-{number:05}.parquet"
        columns = zip(*rows[start : start + per_part], strict=True)
        arrays = [pa.array(list(column), type_) for column, type_, _ in zip(columns, types, names, strict=False)]
        pq.write_table(pa.table(arrays, names=names), part)
        parts.append(str(part))
    return {"parts": parts, "packed": packed, "rows": len(rows)}


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
    per_step = steps["gradient_accumulation_steps"]
    for name in ("working", "output", "run"):
        (root / name).mkdir(parents=True, exist_ok=True)
    plan = [
        {"epoch": 1, "rows": list(range(index * per_step, (index + 1) * per_step)), "learning_rate": step["lr"]}
        for index, step in enumerate(steps["steps"])
    ]
    write_steps(root / "steps.jsonl", plan)
    optimizer = {name: value for name, value in steps["optimizer"].items() if name != "lr"}
    adapter = root / "adapter"
    job = {
        "protocol": 1,
        "task": "train",
        "device": "cpu",
        "dtype": "f32",
        "threads": 1,
        "model": str(GOLDEN / family),
        "method": "lora",
        "adapter": str(adapter if adapter.exists() else adapter_folder(family, variant, adapter)),
        "dropout": steps["lora"].get("lora_dropout", 0.0),
        "parallel": "ddp",
        "attention": "auto",
        "data": write_rows(root / "data", golden_rows(family, variant)),
        "validation": None,
        "steps": str(root / "steps.jsonl"),
        "total_steps": len(plan),
        "micro_batch_size": 1,
        "optimizer": optimizer,
        "clip_grad_norm": steps["clip_grad_norm"],
        "loss_scale": None,
        "activation_checkpointing": False,
        "seed": 0,
        "save_every": 100,
        "keep_last": 2,
        "eval_steps": None,
        "keep_best": False,
        "early_stopping": None,
        "working": str(root / "working"),
        "resume": None,
        "computed_by": "a test",
        "output": str(root / "output"),
        "run_folder": str(root / "run"),
        "profile": False,
        "watchdog_seconds": 60.0,
    }
    return {**job, **changes}


def asking_job(root: Path, family: str, task: str, lines: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """A score or generate job over lines of rows or prompts."""
    (root / "output").mkdir(parents=True, exist_ok=True)
    path = root / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = {"protocol": 1, "task": task, "device": "cpu", "dtype": "f32", "threads": 1, "model": str(GOLDEN / family)}
    common |= {"adapter": None, "batch_size": 2, "output": str(root / "output")}
    sampling = {"temperature": 0.0, "top_k": None, "top_p": None, "min_p": None, "repetition_penalty": None}
    if task == "score":
        return {**common, "rows": str(path), **changes}
    return {**common, "prompts": str(path), "max_new_tokens": 24, "stop_ids": [], **sampling, **changes}


def write_steps(path: Path, plan: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(step) + "\n" for step in plan))


class Ran:
    """What a job said and left."""

    def __init__(self, code: int, lines: str, job: dict[str, Any], errors: str = "") -> None:
        self.code = code
        self.errors = errors
        self.events: list[dict[str, Any]] = [json.loads(line) for line in lines.splitlines()]
        self.output = Path(job["output"])

    def of(self, event: str) -> list[dict[str, Any]]:
        return [said for said in self.events if said["event"] == event]

    @property
    def failed(self) -> dict[str, Any]:
        assert self.code == 1, self.events
        (failed,) = self.of("failed")
        assert self.events[-1] is failed
        return failed

    @property
    def records(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`."""
        text = (self.output / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records if record["kind"] == "train"]

    @property
    def adapter(self) -> dict[str, torch.Tensor]:
        return load_file(self.output / "adapter" / "adapter_model.safetensors")

    @property
    def adapter_bytes(self) -> bytes:
        return (self.output / "adapter" / "adapter_model.safetensors").read_bytes()

    def done(self) -> Ran:
        assert self.code == 0, (self.events[-1:], self.errors)
        assert self.events[-1]["event"] == "finished"
        return self


def write_job(root: Path, job: dict[str, Any]) -> Path:
    path = root / "job.json"
    path.write_text(json.dumps(job))
    return path


def run_here(root: Path, job: dict[str, Any]) -> Ran:
    """Runs a job in this process."""
    said = io.StringIO()
    code = run(write_job(root, job), Voice(said))
    return Ran(code, said.getvalue(), job)


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(PACKAGE / "src"), str(PACKAGE / "tests"), *sys.path])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def start_torchrun(root: Path, job: dict[str, Any], ranks: int, **variables: str) -> subprocess.Popen[str]:
    """Starts a job under torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *torchrun, "-m", "pipeline_torch_worker", str(write_job(root, job))]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**variables)
    )


def run_torchrun(root: Path, job: dict[str, Any], ranks: int, **variables: str) -> Ran:
    """Runs a job under torchrun."""
    started = start_torchrun(root, job, ranks, **variables)
    lines, errors = started.communicate(timeout=300)
    return Ran(started.returncode, lines, job, errors)


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The greatest difference of a tensor, as a share of the greatest value of it."""
    assert found.keys() == expected.keys()
    shares = [
        float((found[name].float() - tensor.float()).abs().max() / tensor.float().abs().max().clamp_min(1e-30))
        for name, tensor in expected.items()
    ]
    return max(shares)
