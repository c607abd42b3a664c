"""What a training step of the torch worker costs more for being directed through a pipe, as `pipeline` directs it.

    python3 benches/torch_pipe.py [--model FOLDER] [--tokens 4096] [--steps 40] [--rounds 5]

Two processes train the same adapter on the same rows in turn: the worker as the stage starts it, with requests on its standard
input, each step's rows sent before the report of the one before it is read; and its trainer alone, called in a loop with batches
that are in memory. Printed are the medians of a step over all rounds, and their difference.
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

import numpy as np

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "workers" / "torch" / "src"
WARM_UP = 5
RATE = 1e-4


def job_of(root: Path, model: Path, threads: int) -> dict[str, object]:
    """A job with a fresh adapter of PEFT's."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=8, target_modules="all-linear", init_lora_weights="gaussian")
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(root / "adapter")
    return {
        "protocol": 1, "task": "train", "device": "cpu", "dtype": "f32", "threads": threads, "model": str(model),
        "method": "lora", "adapter": str(root / "adapter"), "dropout": 0.0, "parallel": "ddp", "attention": "auto", "packed": True,
        "optimizer": {"name": "adamw", "weight_decay": 0.0}, "clip_grad_norm": 1.0, "loss_scale": None,
        "activation_checkpointing": False, "seed": 0, "output": str(root), "run_folder": str(root), "profile": False,
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


def piped(root: Path, counts: object, payload: bytes, steps: int) -> list[float]:
    """Seconds of steps of a worker behind a pipe."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", "pipeline_torch_worker", str(root / "job.json")]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert worker.stdin is not None
    assert worker.stdout is not None
    weight = counts[0][0]["targets"]  # type: ignore[index]

    def send(request: dict[str, object], numbers: bytes = b"") -> None:
        worker.stdin.write(json.dumps({**request, "bytes": len(numbers)}).encode() + b"\n" + numbers)
        worker.stdin.flush()

    def answer() -> None:
        while "answer" not in json.loads(worker.stdout.readline()):
            pass

    accumulate = {"request": "accumulate", "ranks": counts, "weight": weight}
    answer()
    send(accumulate, payload)
    seconds = []
    for _ in range(WARM_UP + steps):
        began = time.perf_counter()
        send({"request": "step", "learning_rate": RATE})
        send(accumulate, payload)
        answer()
        seconds.append(time.perf_counter() - began)
    send({"request": "close"})
    worker.communicate()
    return seconds[WARM_UP:]


def alone(root: Path, counts: object, payload: bytes, steps: int) -> list[float]:
    """Seconds of steps of the trainer in a process of its own."""
    program = "import sys, torch_pipe; torch_pipe.print_alone(*sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}:{Path(__file__).parent}"}
    (root / "numbers").write_bytes(payload)
    arguments = [str(root), json.dumps(counts), str(steps)]
    found = subprocess.run([sys.executable, "-c", program, *arguments], env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def print_alone(root: str, counts: str, steps: str) -> None:
    """What `alone` runs."""
    from pipeline_torch_worker.data import read_batches
    from pipeline_torch_worker.device import open_device
    from pipeline_torch_worker.job import read_job
    from pipeline_torch_worker.parallel import Ranks
    from pipeline_torch_worker.trainer import Trainer

    job = read_job(Path(root) / "job.json")
    device = open_device("cpu", 0, job.threads)
    trainer = Trainer(job, device, Ranks.alone(device))
    ranks = read_batches(json.loads(counts), memoryview((Path(root) / "numbers").read_bytes()))
    seconds = []
    for _ in range(WARM_UP + int(steps)):
        began = time.perf_counter()
        trainer.accumulate(ranks, ranks[0][0].target_tokens)
        trainer.step(RATE)
        seconds.append(time.perf_counter() - began)
    print(json.dumps(seconds[WARM_UP:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "tests" / "golden" / "llama31")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "job.json").write_text(json.dumps(job_of(root, arguments.model, arguments.threads)))
        vocab_size = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
        counts, payload = numbers_of(arguments.tokens, vocab_size)
        found: dict[str, list[float]] = {"alone": [], "piped": []}
        for _ in range(arguments.rounds):
            found["alone"] += alone(root, counts, payload, arguments.steps)
            found["piped"] += piped(root, counts, payload, arguments.steps)
    medians = {name: 1e3 * statistics.median(seconds) for name, seconds in found.items()}
    cost = medians["piped"] - medians["alone"]
    print(f"{arguments.tokens} tokens a step, {len(payload)} bytes; {arguments.rounds} rounds of {arguments.steps} steps")
    for name, seconds in found.items():
        print(f"{name}: {medians[name]:.2f} ms a step (least {1e3 * min(seconds):.2f})")
    print(f"the pipe costs {cost:.2f} ms a step, {100 * cost / medians['alone']:.1f} %")


if __name__ == "__main__":
    main()
