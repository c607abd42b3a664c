"""What a training step of the torch worker costs more for being directed through a pipe, as `pipeline` directs it.

    python3 benches/torch_pipe.py [--model FOLDER] [--tokens 4096] [--steps 4] [--rounds 60]

Two processes train the same adapter on the same rows, some steps in turn: the worker as the stage starts it, with requests on its
standard input, each step's rows sent before the report of the one before it is read; and its trainer alone, called in a loop with
a batch that is in memory. Printed are the least and the median of a step's time, and of the CPU time that the threads of the process
used in it: where others use the machine that says more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "workers" / "torch" / "src"
WARM_UP = 5
RATE = 1e-4
# As the stage sets it: else memory that is given back and taken again at each step is most of the difference, either way.
ALLOCATION = {"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "1073741824"}


def job_of(root: Path, model: Path, threads: int) -> dict[str, object]:
    """A job with a fresh adapter of PEFT's."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=8, target_modules="all-linear", init_lora_weights="gaussian")
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(root / "adapter")
    return {
        "protocol": 1, "task": "train", "device": "cpu", "dtype": "f32", "threads": threads, "model": str(model),
        "method": "lora", "adapter": str(root / "adapter"), "dropout": 0.0, "parallel": "ddp", "attention": "auto", "compile": "none", "packed": True, "quantize": None,
        "label_smoothing": 0.0, "distillation": None,
        "optimizer": {"name": "adamw", "weight_decay": 0.0}, "clip_grad_norm": 1.0, "loss_scale": None,
        "activation_checkpointing": False, "seed": 0, "run_folder": str(root), "profile": False,
        "watchdog_seconds": 600.0,
    }  # fmt: skip


def numbers_of(tokens: int, vocab_size: int) -> tuple[list[list[dict[str, object]]], bytes]:
    """A micro-batch of documents of 64 tokens, all of them targets, as a request has it."""
    documents = tokens // 64
    ids = np.random.default_rng(0).integers(3, vocab_size, (documents, 64), dtype=np.uint32)
    places = np.arange(documents * 64, dtype=np.uint32).reshape(documents, 64)[:, :-1]
    lengths, rows = np.full(documents, 64, np.uint32), np.arange(documents, dtype=np.uint64)
    counts = {"tokens": ids.size, "documents": documents, "targets": places.size, "weighted": False, "responses": False}
    arrays = (ids, lengths, rows, places, ids[:, 1:])
    return [[counts]], b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)


class Piped:
    """A worker behind a pipe, which is sent the rows of a step before the report of the one before it is read."""

    def __init__(self, root: Path, counts: Any, payload: bytes) -> None:
        command = [sys.executable, "-m", "pipeline_torch_worker", str(root / "job.json")]
        self._worker = _start(command)
        self._accumulate = {"request": "accumulate", "ranks": counts, "weight": counts[0][0]["targets"]}
        self._payload = payload
        self._answer()

    @property
    def pid(self) -> int:
        return self._worker.pid

    def step(self, count: int) -> float:
        """Seconds of a step, of so many; between two turns nothing is computed."""
        began = time.perf_counter()
        self._send(self._accumulate, self._payload)
        for number in range(count):
            self._send({"request": "step", "learning_rate": RATE})
            if number + 1 < count:
                self._send(self._accumulate, self._payload)
            self._answer()
        return (time.perf_counter() - began) / count

    def close(self) -> None:
        self._send({"request": "close"})
        self._worker.communicate()

    def _send(self, request: dict[str, Any], numbers: bytes = b"") -> None:
        assert self._worker.stdin is not None
        self._worker.stdin.write(json.dumps({**request, "bytes": len(numbers)}).encode() + b"\n" + numbers)
        self._worker.stdin.flush()

    def _answer(self) -> None:
        assert self._worker.stdout is not None
        while "answer" not in json.loads(self._worker.stdout.readline()):
            pass


class Alone:
    """The trainer in a loop of a process of its own, with the same batch each time; it is told how many steps to do."""

    def __init__(self, root: Path, counts: Any, payload: bytes) -> None:
        (root / "numbers").write_bytes(payload)
        program = "import sys, torch_pipe; torch_pipe.serve_alone(*sys.argv[1:])"
        self._trainer = _start([sys.executable, "-c", program, str(root), json.dumps(counts)])

    @property
    def pid(self) -> int:
        return self._trainer.pid

    def step(self, count: int) -> float:
        """Seconds of a step, of so many."""
        assert self._trainer.stdin is not None
        assert self._trainer.stdout is not None
        self._trainer.stdin.write(f"{count}\n".encode())
        self._trainer.stdin.flush()
        return float(self._trainer.stdout.readline())

    def close(self) -> None:
        self._trainer.communicate()


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **ALLOCATION, "PYTHONPATH": f"{SOURCE}:{Path(__file__).parent}"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def cpu_seconds(pid: int) -> float:
    """What the threads of a process have computed so far."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def serve_alone(root: str, counts: str) -> None:
    """What `Alone` runs."""
    from pipeline_torch_worker.data import read_batches
    from pipeline_torch_worker.device import open_device
    from pipeline_torch_worker.job import read_job
    from pipeline_torch_worker.parallel import Ranks
    from pipeline_torch_worker.trainer import Trainer

    job = read_job(Path(root) / "job.json")
    device = open_device("cpu", 0, job.threads)
    trainer = Trainer(job, device, Ranks.alone(device))
    ranks = read_batches(json.loads(counts), memoryview((Path(root) / "numbers").read_bytes()))
    for line in sys.stdin:
        began = time.perf_counter()
        for _ in range(int(line)):
            trainer.accumulate(ranks, ranks[0][0].target_tokens)
            trainer.step(RATE)
        print((time.perf_counter() - began) / int(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "tests" / "golden" / "llama31")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "job.json").write_text(json.dumps(job_of(root, arguments.model, arguments.threads)))
        vocab_size = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
        counts, payload = numbers_of(arguments.tokens, vocab_size)
        runs = {"alone": Alone(root, counts, payload), "piped": Piped(root, counts, payload)}
        for run in runs.values():
            run.step(WARM_UP)
        found: dict[str, list[float]] = {name: [] for name in runs}
        computed: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(arguments.rounds):
            # Each begins as often.
            for name in sorted(runs, reverse=number % 2 == 1):
                before = cpu_seconds(runs[name].pid)
                found[name].append(runs[name].step(arguments.steps))
                computed[name].append((cpu_seconds(runs[name].pid) - before) / arguments.steps)
        for run in runs.values():
            run.close()
    print(f"{arguments.tokens} tokens a step, {len(payload)} bytes; {arguments.rounds} rounds of {arguments.steps} steps in turn")
    for what, times, of in (
        ("least time", found, min),
        ("median time", found, statistics.median),
        ("least CPU time", computed, min),
        ("median CPU time", computed, statistics.median),
    ):
        alone, piped = (1e3 * of(times[name]) for name in ("alone", "piped"))
        print(f"{what}: {alone:.2f} ms alone, {piped:.2f} ms piped: {piped - alone:+.2f} ms, {100 * (piped / alone - 1):+.1f} %")


if __name__ == "__main__":
    main()
