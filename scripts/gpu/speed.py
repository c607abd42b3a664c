"""LoRA steps in bf16 on rows of one length: the torch worker and the native kernels through the program, PyTorch with PEFT, the same compiled, and
torchtune's recipe, in turn.

A random checkpoint of a shape of Llama is made on the machine. Every linear layer but the head has an adapter of rank 8, layers are
computed again in the backward, and the optimizer is AdamW; tokens a second are medians over steps after the first five.

`--only profile` shows, of the worker and of PEFT, where a step goes: how long the device computes, with which kernels, and how long it waits for the processor.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from importlib.machinery import PathFinder

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
      backend: {backend}
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
    # Dozens of packs each, so that next to none is not full: the others' rows are.
    text = " ".join(f"the fox sees the hen {number}" for number in range(4 * options.seq))
    (project.folder / "speed.jsonl").write_text((json.dumps({"text": text}) + "\n") * options.rows)
    for backend in ("torch", "native"):
        written = FILE.format(seq=options.seq, rows=options.rows, steps=options.steps, device=options.device, backend=backend)
        (project.folder / f"{backend}.yaml").write_text(written)
    weights = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name) + vocabulary * hidden
    return {"weights": weights, "bytes": sum(file.stat().st_size for file in folder.iterdir())}


def of_steps(found, options, weights, name):
    """Tokens a second and the share of the device's arithmetic, of seconds a step."""
    speed = options.seq * options.rows / statistics.median(found)
    # Forward, the gradients of inputs, and the forward again; the adapters' own are left out.
    peak = next((peak for device, peak in PEAKS.items() if device in name), None)
    share = None if peak is None else 2 * 3 * weights * speed / peak
    return {"tokens_per_second": round(speed, 1), "utilisation": share, "steps": len(found)}


def ours(project, options, weights, name, backend, compiled=False):
    """A backend through the program: `torch` through the one that is installed, `native` through one that is built with CUDA."""
    if backend == "native" and not options.native and options.device != "cpu":
        raise Left("`--native` names a program that scripts/build-cuda.sh has built")
    if backend == "native" and options.device not in ("cuda", "cpu"):
        raise Left("the native kernels compute on NVIDIA's devices and on the CPU")
    if compiled and options.device not in ("cuda", "rocm"):
        raise Left("`compile: auto` compiles nothing there")
    home = project.folder / f"home-{time.monotonic_ns()}"
    if backend == "native" and options.native:
        project = project.with_program(options.native)
    project.run("run", f"{backend}.yaml", f"--home={home}", *(["adapter.compile=auto"] if compiled else []))
    (events,) = home.glob("runs/*/events.jsonl")
    said = [json.loads(line)["what"].get("said", {}) for line in events.read_text().splitlines()]
    steps = [event["values"] for event in said if event.get("event") == "metrics" and event["values"]["kind"] == "train"]
    seconds = [step["tokens"] / step["tokens_per_second"] for step in steps[5:]]
    shown = project.json("runs", "show", "latest", "adapter", f"--home={home}")
    if compiled and not shown["how"]["compiled"]:
        raise RuntimeError("`compile: auto` compiled nothing")
    # The native kernels do not count the device's memory.
    peaks = shown["how"].get("peak_memory_bytes_of_ranks")
    shutil.rmtree(home)
    return {**of_steps(seconds, options, weights, name), "peak_bytes": peaks and max(peaks)}


# Of what torch.profiler writes: what the device does, and the calls by which the processor has it do so or waits for it.
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
RECORDED = 3


def of_trace(path):
    """Where a step goes, in milliseconds, by a trace of `RECORDED` steps."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    device = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") in ON_DEVICE)
    busy, until = 0.0, float("-inf")
    for began, ended in device:
        busy += max(0.0, ended - max(began, until))
        until = max(until, ended)
    operations = [event for event in events if event.get("cat") == "cpu_op"]
    whole = [*device, *((event["ts"], event["ts"] + event["dur"]) for event in operations)]

    def longest(*categories):
        spent, calls = Counter(), Counter()
        for event in events:
            if event.get("cat") in categories:
                spent[event["name"][:120]] += event["dur"]
                calls[event["name"][:120]] += 1
        return {name: [each(time), round(calls[name] / RECORDED, 1)] for name, time in spent.most_common(20)}

    def each(microseconds):
        return round(microseconds / 1000 / RECORDED, 3)

    return {
        "step_ms": each(max(ended for _, ended in whole) - min(began for began, _ in whole)),
        "device_busy_ms": each(busy),
        "on_device": len(device) / RECORDED,
        "operations": len(operations) / RECORDED,
        "kernels": longest(*ON_DEVICE),
        "calls": longest("cuda_runtime", "cuda_driver"),
    }


def profiled(project, options):
    """The torch worker's third to fifth step. The profiler slows the processor down: compare with another profile, not with a clock."""
    home = project.folder / f"home-{time.monotonic_ns()}"
    project.run("run", "torch.yaml", f"--home={home}", "adapter.profile=true", "adapter.max_steps=6")
    (trace,) = home.glob("runs/*/adapter/torch-rank-0.trace.json")
    found = of_trace(trace)
    shutil.rmtree(home)
    return found


def rival_profiled(project, options):
    """As many steps of plain PyTorch, transformers and PEFT."""
    trace = project.folder / "rival.trace.json"
    run_rival(project, options, 2 + RECORDED, False, trace)
    return of_trace(trace)


RIVAL = """
import json, statistics, sys, time, torch
from transformers import AutoModelForCausalLM
from peft import LoraConfig, get_peft_model
folder, device, seq, rows, steps, compiled, trace = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7]), sys.argv[7]
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
recorder = torch.profiler.profile() if trace else None
for step in range(steps):
    if trace and step == 2:
        recorder.start()
    began = time.perf_counter()
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        loss = run(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loss.item()
    seconds.append(time.perf_counter() - began)
if trace:
    recorder.stop()
    recorder.export_chrome_trace(trace)
print(json.dumps({"seconds": seconds[5:], "peak": torch.cuda.max_memory_allocated() if device.startswith("cuda") else None}))
"""


def rival(project, options, weights, name, compiled):
    """Plain PyTorch, transformers and PEFT."""
    if compiled and options.device == "cpu":
        raise Left("compiling takes minutes there")
    found = run_rival(project, options, options.steps, compiled)
    return {**of_steps(found["seconds"], options, weights, name), "peak_bytes": found["peak"]}


def run_rival(project, options, steps, compiled, trace=""):
    """What the program above printed."""
    device = "cpu" if options.device == "cpu" else project.torch_device
    numbers = (options.seq, options.rows, steps, int(compiled))
    command = [sys.executable, "-c", RIVAL, project.folder / "checkpoint", device, *numbers, trace]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if ran.returncode != 0:
        raise RuntimeError(ran.stderr[-2000:])
    return json.loads(ran.stdout.strip().splitlines()[-1])


RECIPE = """
tokenizer: {{ _component_: torchtune_tokenizer.JsonTokenizer, path: {model}/tokenizer.json, bos: "<|begin_of_text|>", eos: "<|end_of_text|>", max_seq_len: {seq} }}
model:
  _component_: torchtune.models.llama3_2.lora_llama3_2
  lora_attn_modules: [q_proj, k_proj, v_proj, output_proj]
  apply_lora_to_mlp: True
  vocab_size: {vocabulary}
  num_layers: {layers}
  num_heads: {heads}
  num_kv_heads: {kv_heads}
  embed_dim: {hidden}
  intermediate_dim: {intermediate}
  max_seq_len: 8192
  attn_dropout: 0.0
  norm_eps: 1.0e-06
  rope_base: 10000
  scale_factor: 1
  lora_rank: 8
  lora_alpha: 16
  lora_dropout: 0.0
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: {model}
  checkpoint_files: {files}
  recipe_checkpoint: null
  output_dir: {out}
  model_type: LLAMA3_2
resume_from_checkpoint: False
save_adapter_weights_only: True
dataset: {{ _component_: torchtune.datasets.text_completion_dataset, source: json, data_files: {rows}, column: text, packed: True, split: train }}
seed: 0
shuffle: False
batch_size: {batch}
optimizer: {{ _component_: torch.optim.AdamW, fused: {fused}, weight_decay: 0.01, lr: 1e-4 }}
lr_scheduler: {{ _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 0 }}
loss: {{ _component_: torchtune.modules.loss.CEWithChunkedOutputLoss }}
epochs: 100
max_steps_per_epoch: {steps}
gradient_accumulation_steps: 1
clip_grad_norm: 1.0
compile: {compiled}
output_dir: {out}
metric_logger: {{ _component_: torchtune.training.metric_logging.DiskLogger, log_dir: {out}/logs }}
log_every_n_steps: 1
log_peak_memory_stats: {fused}
device: {device}
dtype: bf16
enable_activation_checkpointing: True
enable_activation_offloading: False
profiler: {{ _component_: torchtune.training.setup_torch_profiler, enabled: False }}
"""


def torchtune(project, options, weights, name, compiled):
    """torchtune's recipe for one device, on the same checkpoint and text, packed."""
    # Apart from the others' packages: PEFT refuses to work beside the torchao that torchtune needs.
    recipes = PathFinder.find_spec("recipes", [options.torchtune] if options.torchtune else None)
    if recipes is None:
        raise Left("torchtune is not installed")
    if compiled and options.device == "cpu":
        raise Left("compiling takes minutes there")
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[options.shape]
    folder, model = project.folder / "torchtune", project.folder / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    # More rows than the steps of one epoch need.
    rows = (project.folder / "torch.jsonl", project.folder / "speed.jsonl")
    rows[0].write_text(rows[1].read_text() * (options.steps // 40 + 1))
    device = "cpu" if options.device == "cpu" else "cuda"
    (folder / "recipe.yaml").write_text(RECIPE.format(
        model=model, files=sorted(file.name for file in model.glob("*.safetensors")), out=folder / "out", rows=rows[0], seq=options.seq,
        vocabulary=vocabulary, layers=layers, heads=heads, kv_heads=kv_heads, hidden=hidden, intermediate=intermediate, batch=options.rows,
        fused=device == "cuda", steps=options.steps, compiled=compiled, device=device,
    ))  # fmt: skip
    recipe = f"{recipes.submodule_search_locations[0]}/lora_finetune_single_device.py"
    path = os.pathsep.join(filter(None, [str(ROOT / "benches/rivals"), options.torchtune, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, recipe, "--config", folder / "recipe.yaml", "epochs=1"]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, cwd=folder)
    if ran.returncode != 0:
        raise RuntimeError(ran.stderr[-2000:])
    [log] = (folder / "out/logs").glob("log_*.txt")
    lines = [dict(word.split(":") for word in line.split("|")[1].split()) for line in log.read_text().splitlines()][5:]
    # By its own count, which leaves out the last token of a row.
    seconds = [options.seq * options.rows / float(line["tokens_per_second_per_gpu"]) for line in lines]
    peaks = [float(line["peak_memory_alloc"]) for line in lines if "peak_memory_alloc" in line]
    return {**of_steps(seconds, options, weights, name), "peak_bytes": int(max(peaks) * 2**30) if peaks else None}


def main():
    options = arguments(__doc__.splitlines()[0], shape="1b", seq=2048, rows=4, steps=25, rounds=3, native="", torchtune="")
    if options.device == "cpu":
        options.shape, options.seq, options.rows, options.steps, options.rounds = "tiny", 128, 2, 8, 1
    project, report = Project(options.pipeline, options.device), Report(options.out)
    project.torch_device = "npu:0" if options.device == "npu" else "cuda:0"
    try:
        import torch

        name = torch.cuda.get_device_name(0) if options.device in ("cuda", "rocm") else options.device
        report.check("checkpoint", lambda: {**make(project, options), "device": name, "shape": options.shape})
        weights = report.checks["checkpoint"].get("weights", 0)
        profiles = {"profile": profiled, "profile of PEFT": rival_profiled}
        for program, look in profiles.items():
            if options.only in program:
                report.check(program, lambda look=look: look(project, options))
        for number in range(options.rounds):
            programs = {
                "pipeline": lambda: ours(project, options, weights, name, "torch"),
                "pipeline, compiled": lambda: ours(project, options, weights, name, "torch", compiled=True),
                "pipeline, native": lambda: ours(project, options, weights, name, "native"),
                "PEFT": lambda: rival(project, options, weights, name, compiled=False),
                "PEFT, compiled": lambda: rival(project, options, weights, name, compiled=True),
                "torchtune": lambda: torchtune(project, options, weights, name, compiled=False),
                "torchtune, compiled": lambda: torchtune(project, options, weights, name, compiled=True),
            }
            for program, measure in programs.items():
                if options.only in program:
                    report.check(f"{program}, round {number + 1}", measure)
    finally:
        shutil.rmtree(project.folder, ignore_errors=True)
    return report.code()


if __name__ == "__main__":
    sys.exit(main())
