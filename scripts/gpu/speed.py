"""LoRA steps in bf16 on rows of one length: this worker through the program, plain PyTorch with PEFT, and the same compiled, in turn.

A random checkpoint of a shape of Llama is made on the machine. Every linear layer but the head has an adapter of rank 8, layers are
computed again in the backward, and the optimizer is AdamW; tokens a second are medians over steps after the first five.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time

from common import ROOT, Left, Project, Report, arguments

SHAPES = {
    # hidden, intermediate, layers, heads, key-value heads, vocabulary
    "tiny": (64, 128, 2, 4, 2, 2048),
    "1b": (2048, 8192, 16, 32, 8, 128256),
    "8b": (4096, 14336, 32, 32, 8, 128256),
}
# Multiplications and additions a second of dense bf16 products, by the name of the device; the vendors' tables.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
FILE = """
version: 1
name: speed
stages:
  text: {{ uses: dataset, with: {{ source: ./speed.jsonl }} }}
  base: {{ uses: download, with: {{ path: ./checkpoint }} }}
  tokens: {{ uses: tokenize, with: {{ dataset: text, tokenizer: base, max_seq_len: {seq} }} }}
  packs: {{ uses: pack, with: {{ tokens: tokens, max_seq_len: {seq} }} }}
  adapter:
    uses: train
    with:
      model: base
      data: packs
      dtype: bf16
      backend: torch
      lora: {{ rank: 8, target_modules: all-linear }}
      optimizer: {{ learning_rate: 1e-4 }}
      activation_checkpointing: true
      micro_batch_size: {rows}
      epochs: 100000
      max_steps: {steps}
      save_every: 100000
    resources: {{ device: {device} }}
"""


def make(project, options):
    """The checkpoint, and rows that fill packs."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[options.shape]
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocabulary, max_position_embeddings=max(8192, options.seq), tie_word_embeddings=True,
    )
    torch.set_default_dtype(torch.bfloat16)
    on = "cpu" if options.device == "cpu" else project.torch_device
    with torch.device(on):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    folder = project.folder / "checkpoint"
    model.save_pretrained(folder)
    for file in (ROOT / "tests/golden/data/tokenizers/bytelevel").iterdir():
        shutil.copy(file, folder)
    text = " ".join(f"the fox sees the hen {number}" for number in range(options.seq // 4))
    rows = 4 * options.rows
    (project.folder / "speed.jsonl").write_text((json.dumps({"text": text}) + "\n") * rows)
    written = FILE.format(seq=options.seq, rows=options.rows, steps=options.steps, device=options.device)
    (project.folder / "speed.yaml").write_text(written)
    weights = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name) + vocabulary * hidden
    return {"weights": weights, "bytes": sum(file.stat().st_size for file in folder.iterdir())}


def of_steps(found, options, weights, name):
    """Tokens a second and the share of the device's arithmetic, of seconds a step."""
    speed = options.seq * options.rows / statistics.median(found)
    # Forward, the gradients of inputs, and the forward again; the adapters' own are left out.
    peak = next((peak for device, peak in PEAKS.items() if device in name), None)
    share = None if peak is None else 2 * 3 * weights * speed / peak
    return {"tokens_per_second": round(speed, 1), "utilisation": share, "steps": len(found)}


def ours(project, options, weights, name):
    """This worker, through the program."""
    home = project.folder / f"home-{time.monotonic_ns()}"
    project.run("run", "speed.yaml", f"--home={home}")
    (events,) = home.glob("runs/*/events.jsonl")
    said = [json.loads(line)["what"].get("said", {}) for line in events.read_text().splitlines()]
    steps = [event["values"] for event in said if event.get("event") == "metrics" and event["values"]["kind"] == "train"]
    seconds = [step["tokens"] / step["tokens_per_second"] for step in steps[5:]]
    shown = project.json("runs", "show", "latest", "adapter", f"--home={home}")
    peak = max(shown["how"]["peak_memory_bytes_of_ranks"])
    shutil.rmtree(home)
    return {**of_steps(seconds, options, weights, name), "peak_bytes": peak}


RIVAL = """
import json, statistics, sys, time, torch
from transformers import AutoModelForCausalLM
from peft import LoraConfig, get_peft_model
folder, device, seq, rows, steps, compiled = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").to(device)
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
model.enable_input_require_grads()
model.gradient_checkpointing_enable()
model.train()
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device != "cpu")
run = torch.compile(model) if compiled else model
ids = torch.randint(0, 200, (rows, seq), device=device)
seconds = []
for _ in range(steps):
    began = time.perf_counter()
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        loss = run(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loss.item()
    seconds.append(time.perf_counter() - began)
print(json.dumps({"seconds": seconds[5:], "peak": torch.cuda.max_memory_allocated() if device.startswith("cuda") else None}))
"""


def rival(project, options, weights, name, compiled):
    """Plain PyTorch, transformers and PEFT."""
    if compiled and options.device == "cpu":
        raise Left("compiling takes minutes there")
    device = "cpu" if options.device == "cpu" else project.torch_device
    command = [sys.executable, "-c", RIVAL, project.folder / "checkpoint", device, options.seq, options.rows, options.steps, int(compiled)]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if ran.returncode != 0:
        raise RuntimeError(ran.stderr[-2000:])
    found = json.loads(ran.stdout.strip().splitlines()[-1])
    return {**of_steps(found["seconds"], options, weights, name), "peak_bytes": found["peak"]}


def main():
    options = arguments(__doc__.splitlines()[0], shape="1b", seq=2048, rows=4, steps=25, rounds=3)
    if options.device == "cpu":
        options.shape, options.seq, options.rows, options.steps, options.rounds = "tiny", 128, 2, 8, 1
    project, report = Project(options.pipeline, options.device), Report(options.out)
    project.torch_device = "npu:0" if options.device == "npu" else "cuda:0"
    try:
        import torch

        name = torch.cuda.get_device_name(0) if options.device in ("cuda", "rocm") else options.device
        report.check("checkpoint", lambda: {**make(project, options), "device": name, "shape": options.shape})
        weights = report.checks["checkpoint"].get("weights", 0)
        for number in range(options.rounds):
            programs = {
                "pipeline": lambda: ours(project, options, weights, name),
                "PEFT": lambda: rival(project, options, weights, name, compiled=False),
                "PEFT, compiled": lambda: rival(project, options, weights, name, compiled=True),
            }
            for program, measure in programs.items():
                if options.only in program:
                    report.check(f"{program}, round {number + 1}", measure)
    finally:
        shutil.rmtree(project.folder, ignore_errors=True)
    return report.code()


if __name__ == "__main__":
    sys.exit(main())
