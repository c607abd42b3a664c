#!/usr/bin/env python3
"""Compares the peak memory that `pipeline plan` foretells for a train stage with the one that its process has.

    cargo build --release
    python3 benches/memory.py [--pipeline target/release/pipeline] [--only TEXT] [--steps 3] [--threads 2]

Each configuration makes a fresh model, packs (or tokens of changing lengths), plans the train stage, runs a few steps of it and
prints one row of a Markdown table. The peak is that of the memory that no file backs (`RssAnon` and `RssShmem` of `/proc/PID/status`),
looked at every few milliseconds: pages of files the system takes back when it needs them. Beside it stands the system's own figure
for the process (`ru_maxrss`, file pages and all), which `pipeline runs show` gives, too; where that is lower than what was foretold,
so is every peak between two looks. It ends with code 1 where a difference is over 15 %. Linux, Python 3.9 or newer, nothing else. It
takes a few minutes and, at the most, 1 GiB of memory.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

MIB = 1 << 20

# hidden, intermediate, layers, heads, key-value heads, vocabulary
SHAPES = {
    "128x4": (128, 384, 4, 4, 2, 1024),
    "256x8": (256, 768, 8, 4, 2, 4096),
    "384x12": (384, 1024, 12, 6, 2, 8192),
    "576x16": (576, 1536, 16, 9, 3, 8192),
}

# shape, row length, micro-batch, method, dtype, activation checkpointing, rows
GRID = [
    ("128x4", 128, 1, "lora", "f32", False, "packs"),
    ("128x4", 512, 4, "lora", "f32", False, "packs"),
    ("256x8", 256, 2, "lora", "f32", False, "packs"),
    ("256x8", 512, 2, "full", "f32", False, "packs"),
    ("256x8", 512, 4, "lora", "bf16", False, "packs"),
    ("384x12", 512, 2, "lora", "f32", False, "packs"),
    ("384x12", 512, 2, "lora", "f32", True, "packs"),
    ("384x12", 512, 4, "lora", "bf16", True, "packs"),
    ("384x12", 256, 1, "full", "f32", False, "packs"),
    ("384x12", 256, 2, "full", "bf16", True, "packs"),
    ("576x16", 1024, 1, "lora", "f32", False, "packs"),
    ("576x16", 512, 1, "lora", "bf16", False, "packs"),
    ("256x8", 512, 4, "lora", "f32", False, "tokens"),
    ("384x12", 512, 2, "full", "f32", False, "tokens"),
    ("128x4", 256, 8, "full", "f32", False, "packs"),
    ("256x8", 256, 4, "lora", "f32", True, "packs"),
    ("256x8", 256, 4, "full", "bf16", False, "tokens"),
    ("384x12", 1024, 1, "lora", "bf16", False, "packs"),
    ("576x16", 512, 2, "lora", "f32", True, "packs"),
    ("576x16", 256, 2, "lora", "bf16", False, "tokens"),
]

# What an estimate may be wrong by: `MARGIN` of stages/src/kinds/train/preflight.rs.
MARGIN = 0.15

# Seconds between two looks.
INTERVAL = 0.003

ALL_LINEAR = "all-linear"


def write_text(path, rows, words_per_row):
    """Text of made-up words: enough of them for the tokenizer to find as many ids as it is asked for."""
    draw = random.Random(0)
    syllables = [a + b for a in "bcdfghklmnprstvwz" for b in "aeiou"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(12000)]
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(rows):
            count = draw.randint(words_per_row // 8, words_per_row)
            file.write(json.dumps({"text": " ".join(draw.choices(words, k=count))}) + "\n")


def pipeline_file(configuration, number, steps):
    """The pipeline of one configuration, as JSON, which is YAML."""
    shape, length, micro_batch, method, dtype, checkpointing, rows = configuration
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    train = {
        "model": "fresh",
        "data": rows,
        "method": method,
        "dtype": dtype,
        "micro_batch_size": micro_batch,
        "gradient_accumulation_steps": 2,
        "activation_checkpointing": checkpointing,
        "max_steps": steps,
        # What changes memory alone is in no key: without a seed of its own, a configuration would find the result of another.
        "seed": number,
    }
    if method == "lora":
        train["lora"] = {"rank": 8, "target_modules": ALL_LINEAR}
    stages = {
        "text": {"uses": "dataset", "with": {"source": "./text.jsonl"}},
        "fresh": {
            "uses": "new_model",
            "with": {
                "text": "text",
                "vocab_size": vocabulary,
                "hidden_size": hidden,
                "intermediate_size": intermediate,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
            },
        },
        "tokens": {"uses": "tokenize", "with": {"dataset": "text", "tokenizer": "fresh", "max_seq_len": length}},
        "packs": {"uses": "pack", "with": {"tokens": "tokens", "max_seq_len": length}},
        "trained": {"uses": "train", "with": train},
    }
    return json.dumps({"version": 1, "name": "memory", "stages": stages})


class Watch(threading.Thread):
    """Looks at the memory of the processes that a process starts, until it ends."""

    def __init__(self, parent):
        super().__init__(daemon=True)
        self.parent, self.peak, self.ended = parent, 0, threading.Event()

    def run(self):
        while not self.ended.wait(INTERVAL):
            self.peak = max([self.peak, *map(unbacked, self.children())])

    def children(self):
        found = []
        try:
            for thread in os.listdir(f"/proc/{self.parent}/task"):
                found += Path(f"/proc/{self.parent}/task/{thread}/children").read_text(encoding="ascii").split()
        except OSError:
            pass  # The thread, or the process, has ended: there is another look soon, or none is needed.
        return found


def unbacked(process):
    """The bytes of a process that no file backs; 0 for one that is gone."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    lines = (line.split() for line in status.splitlines())
    return sum(int(words[1]) << 10 for words in lines if words and words[0] in ("RssAnon:", "RssShmem:"))


def run(arguments, home, *command):
    """The JSON that a command of the program prints, and the most memory that a process of its had at once."""
    command = [arguments.pipeline, *command, "--format", "json"]
    environment = dict(os.environ, PIPELINE_HOME=str(home))
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        watch = Watch(process.pid)
        watch.start()
        out, error = process.communicate()
        watch.ended.set()
        watch.join()
    if process.returncode != 0:
        sys.exit(f"`{' '.join(command)}` failed:\n{out}{error}")
    return json.loads(out), watch.peak


def measure(arguments, folder, configuration, number):
    """The foretold peak of the train stage, the real one of what no file backs, and that of all, in bytes."""
    file, home, rows = folder / "memory.yaml", folder / "home", configuration[-1]
    file.write_text(pipeline_file(configuration, number, arguments.steps), encoding="utf-8")
    threads = ["--threads", str(arguments.threads)]
    run(arguments, home, "run", str(file), "--until", rows, "--until", "fresh", *threads)
    planned, _ = run(arguments, home, "plan", str(file))
    done, unbacked_peak = run(arguments, home, "run", str(file), *threads)
    return trained_of(planned)["preflight"]["peak_memory_bytes"], unbacked_peak, trained_of(done)["peak_memory_bytes"]


def trained_of(result):
    """The train stage in what a command has printed."""
    return next(stage for stage in result["stages"] if stage["stage"] == "trained")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pipeline", default="target/release/pipeline", help="the built program")
    parser.add_argument("--only", default="", help="configurations whose row of the table has this text")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps, of two micro-batches each")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    arguments.pipeline = str(Path(arguments.pipeline).resolve())
    print("| shape | rows | micro-batch | trained | foretold | measured | difference | with file pages |")
    print("|---|---|---|---|---|---|---|---|")
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "text.jsonl", rows=400, words_per_row=600)
        for number, configuration in enumerate(GRID):
            shape, length, micro_batch, method, dtype, checkpointing, rows = configuration
            trained = f"{method}, {dtype}" + (", checkpointing" if checkpointing else "")
            label = f"| {shape} | {rows} of {length} | {micro_batch} | {trained} |"
            if arguments.only not in label:
                continue
            foretold, measured, resident = measure(arguments, folder, configuration, number)
            difference = foretold / measured - 1
            worst = max(worst, abs(difference))
            sizes = [f"{size / MIB:.0f} MiB" for size in (foretold, measured, resident)]
            print(f"{label} {sizes[0]} | {sizes[1]} | {100 * difference:+.0f} % | {sizes[2]} |", flush=True)
    print(f"\nthe largest difference: {100 * worst:.0f} %", file=sys.stderr)
    return int(worst > MARGIN)


if __name__ == "__main__":
    sys.exit(main())
