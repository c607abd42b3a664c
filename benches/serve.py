#!/usr/bin/env python3
"""`pipeline serve` and llama.cpp's server in turn: the same weights, clients, threads and machine.

    python3 -m venv rivals && rivals/bin/pip install xllamacpp
    cargo build --release
    RIVAL_PYTHON=rivals/bin/python python3 benches/serve.py [--weights bf16,q8_0,q4_0] [--clients 1,4,16] [--rounds 3] [--threads 2]

The weights are random, of SmolLM-135M's shape but for a small vocabulary; `pipeline` makes them and writes them as GGUF. Each client streams completions of
128 tokens of prompts of 256 random tokens, of which no two begin alike. Ours beside `q8_0` is `--quantize int8`, beside `q4_0` `--quantize int4`; beside `bf16`
`--dtype bf16`. Prints a Markdown table: medians over the rounds, in each of which every server is asked once, of new tokens a second of all clients, the median
and the longest time to the first text and between texts of one client, and processor seconds of the server. Nothing is needed from the network.

    python3 benches/serve.py --adapters 4 --clients 16 [--rounds 3] [--threads 2]

Clients of one adapter, and the same number of clients of several on one base, in turn on one server in f32: LoRA of rank 8 on every projection.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import measure

ROOT = Path(__file__).resolve().parent.parent
PIPELINE = Path(os.environ.get("PIPELINE", ROOT / "target/release/pipeline"))
PROMPT, NEW = 256, 128
POSITIONS = 512
OURS = {"bf16": ["--dtype", "bf16"], "q8_0": ["--quantize", "int8"], "q4_0": ["--quantize", "int4"]}
FILE = """
version: 1
stages:
  text:
    uses: dataset
    with: {{ source: {text} }}
  model:
    uses: new_model
    with:
      {{ text: text, vocab_size: 2048, hidden_size: 576, intermediate_size: 1536, num_hidden_layers: 30, num_attention_heads: 9,
         num_key_value_heads: 3, max_position_embeddings: {positions} }}
{stages}
publish:
{published}
"""


ADAPTER = """
  rows:
    uses: dataset
    with: {{ source: {text} }}
  tokens:
    uses: tokenize
    with: {{ dataset: rows, tokenizer: model, max_seq_len: 64 }}
  adapter:
    uses: train
    with:
      {{ model: model, data: tokens, lora: {{ rank: 8, target_modules: all-linear }}, optimizer: {{ learning_rate: 1e-2 }}, micro_batch_size: 1, max_steps: 2 }}
"""
ADAPTER_PUBLISHED = "  model.model: ./model\n  model.tokenizer: ./tokenizer\n  adapter.adapter: ./adapter"


def make(folder, weights):
    """The model, and it as GGUF; the pipeline file that they are of."""
    stages = "\n".join(f"  as_{kind}:\n    uses: gguf\n    with: {{ model: model, type: {kind} }}" for kind in weights)
    published = "\n".join(f"  as_{kind}: ./{kind}" for kind in weights)
    file = folder / "bench.yaml"
    text = ROOT / "pipelines/quickstart/text.jsonl"
    file.write_text(FILE.format(text=text, positions=POSITIONS, stages=stages, published=published))
    subprocess.run([PIPELINE, "run", "-q", file], check=True, stdout=subprocess.DEVNULL)
    return file


class Server:
    """A server that is asked at an address."""

    def __init__(self, command, first_line_of, model):
        self.process = subprocess.Popen(
            [str(word) for word in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        lines = self.process.stdout if first_line_of == "stdout" else self.process.stderr
        line = next((line for line in lines if "127.0.0.1:" in line), None)
        if line is None:
            raise SystemExit(f"{command[0]} does not serve")
        for stream in (self.process.stdout, self.process.stderr):
            threading.Thread(target=stream.read, daemon=True).start()
        self.address = "127.0.0.1:" + line.split("127.0.0.1:")[1].split("/")[0].strip()
        self.model = model

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def processor_seconds(self):
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def complete(self, prompt, model=None):
        """The seconds up to each text of a completion, and its tokens."""
        body = {
            "model": model or self.model, "prompt": prompt, "max_tokens": NEW, "stream": True,
            # Drawn, as the likeliest tokens of random weights may be parts of one letter for ever, and no text comes.
            "temperature": 1, "top_k": 40, "seed": 1,
            # The end of text, so that all are of one length.
            "logit_bias": {"1": -100}, "stream_options": {"include_usage": True},
        }  # fmt: skip
        connection = http.client.HTTPConnection(self.address, timeout=600)
        began, times, tokens = time.perf_counter(), [], 0
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{response.status}: {response.read()[:500]}")
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("choices") and event["choices"][0].get("text"):
                times.append(time.perf_counter() - began)
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        connection.close()
        return times, tokens


def load(server, clients, seed, models=None):
    """One completion of each client, all at the same time; with `models` each of these in turn."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(3, 300) for _ in range(PROMPT)] for _ in range(clients)]
    results = [None] * clients

    def ask(index):
        results[index] = server.complete(prompts[index], models and models[index % len(models)])

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(clients)]
    began, before = time.perf_counter(), server.processor_seconds()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall, cpu = time.perf_counter() - began, server.processor_seconds() - before
    if any(result is None or result[1] != NEW for result in results):
        raise SystemExit(f"not all were completed: {[result and result[1] for result in results]}")
    gaps = [after - before for times, _ in results for before, after in zip(times, times[1:])]
    first = [times[0] for times, _ in results]
    return {
        "tokens a second": clients * NEW / wall,
        "first text, ms": 1000 * statistics.median(first),
        "longest": 1000 * max(first),
        "between, ms": 1000 * statistics.median(gaps),
        "longest ": 1000 * max(gaps),
        "CPU s": cpu,
    }


def compare(servers, clients, rounds, models=None):
    """A line for each server: medians over the rounds, in each of which every server is asked once. With `models` it is one server for different models."""
    found = {name: [] for name in servers}
    for number in range(rounds):
        for name, server in servers.items():
            found[name].append(load(server, clients, f"{clients} {number}", models and models[name]))
    for name, of_server in found.items():
        medians = {what: f"{statistics.median(values[what] for values in of_server):.1f}" for what in of_server[0]}
        yield {"clients": str(clients), "server": name, **medians}


def compare_adapters(folder, options):
    """Clients of one adapter, and as many of several."""
    file = folder / "bench.yaml"
    text = ROOT / "pipelines/quickstart/text.jsonl"
    file.write_text(FILE.format(text=text, positions=POSITIONS, stages=ADAPTER.format(text=text), published=ADAPTER_PUBLISHED))
    subprocess.run([PIPELINE, "run", "-q", file], check=True, stdout=subprocess.DEVNULL)
    names = [f"adapter-{number}" for number in range(options.adapters)]
    adapters = [word for name in names for word in ("--adapter", f"{name}={folder / 'adapter'}")]
    counts = [int(count) for count in options.clients.split(",")]
    command = [PIPELINE, "serve", "--model", folder / "model", "--tokenizer", folder / "tokenizer", *adapters, "--port", "0", "--threads", options.threads, "--max-concurrency", max(counts)]
    head = None
    with Server(command, "stderr", names[0]) as server:
        load(server, 1, 0)
        models = {"1 adapter": names[:1], f"{len(names)} adapters": names}
        for clients in counts:
            for cells in compare(dict.fromkeys(models, server), clients, options.rounds, models):
                if head is None:
                    head = list(cells)
                    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
                print("| " + " | ".join(cells.values()) + " |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default="bf16,q8_0,q4_0")
    parser.add_argument("--clients", default="1,4,16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--adapters", type=int)
    options = parser.parse_args()
    if options.adapters:
        with tempfile.TemporaryDirectory() as name:
            compare_adapters(Path(name), options)
        return
    weights, counts = options.weights.split(","), [int(count) for count in options.clients.split(",")]
    rival = measure.python_with("xllamacpp")
    if rival is None:
        print("llama.cpp is not installed: RIVAL_PYTHON names a Python that has xllamacpp")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = make(folder, weights)
        head = None
        for kind in weights:
            most = max(counts)
            commands = {
                "pipeline": ([PIPELINE, "serve", file, "model", "--port", "0", "--threads", options.threads, "--max-concurrency", most,
                              *OURS[kind]], "stderr"),
            }  # fmt: skip
            if rival:
                gguf = next((folder / kind).rglob("*.gguf"))
                script = Path(__file__).parent / "rivals/llama_cpp_server.py"
                commands["llama.cpp"] = ([rival, script, gguf, "--parallel", most, "--positions", POSITIONS, "--threads", options.threads], "stdout")
            with contextlib.ExitStack() as stack:
                servers = {name: stack.enter_context(Server(command, line, "model")) for name, (command, line) in commands.items()}
                for server in servers.values():
                    load(server, 1, 0)
                for clients in counts:
                    for cells in compare(servers, clients, options.rounds):
                        if head is None:
                            head = list(cells)
                            print("| weights | " + " | ".join(head) + " |\n" + "|---" * (1 + len(head)) + "|")
                        print(f"| {kind} | " + " | ".join(cells.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
