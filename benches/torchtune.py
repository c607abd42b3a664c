#!/usr/bin/env python3
"""XSum, packed, loss on the summaries alone: torchtune's own LoRA recipe and `pipeline run` on the same checkpoint and rows.

    python3 -m venv rivals && rivals/bin/pip install torch transformers torchtune 'torchao==0.13.0' torchdata
    cargo build --release
    RIVAL_PYTHON=rivals/bin/python python3 benches/torchtune.py --rows XSUM.jsonl [--steps 12] [--max-seq-len 2048]

`--rows` is a JSONL file with `document` and `summary`. The checkpoint is made up: a Llama of SmolLM-135M's shape with the
vocabulary of `tests/golden/data/tokenizers/bytelevel`. Both read the same rows in the same order, pack them alike, and learn with
AdamW and a cosine; their adapters begin with other random values, so losses are compared, not adapters. The recipe computes in f32,
`pipeline` in f32 and in bf16. Prints a Markdown table and the comparison of the losses.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import measure

TOKENIZER = measure.ROOT / "tests/golden/data/tokenizers/bytelevel"
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
RIVALS = Path(__file__).parent / "rivals"
SHAPE = {"vocab_size": 2048, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
         "num_key_value_heads": 3, "intermediate_size": 1536, "max_position_embeddings": 8192}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--max-seq-len", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    python = measure.python_with("torchtune", "torchdata", "transformers")
    if python is None:
        sys.exit("no torchtune, torchdata and transformers: RIVAL_PYTHON names a Python that has them")
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        make_checkpoint(python, folder / "model")
        rows_that_fit(python, arguments.rows, folder / "rows.jsonl", arguments.max_seq_len)
        results = {"torchtune, f32": torchtune(python, folder, arguments)}
        for dtype in ("f32", "bf16"):
            results[f"pipeline, {dtype}"] = pipeline(folder, dtype, arguments)
    report(results)


def make_checkpoint(python, folder, tied=False, dtype="float32"):
    """A checkpoint with random weights of a `dtype`, written by transformers; `tied`: with one matrix for embedding and head."""
    program = f"""
import json, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(**{SHAPE!r}, rms_norm_eps=1e-5, tie_word_embeddings={tied}, bos_token_id=0, eos_token_id=1,
                     rope_parameters={{"rope_type": "default", "rope_theta": 500000.0}})
LlamaForCausalLM(config).to(torch.{dtype}).save_pretrained({str(folder)!r})
path = {str(folder / "config.json")!r}
config = json.load(open(path))
config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
config["torch_dtype"] = config.pop("dtype")
json.dump(config, open(path, "w"))
"""
    subprocess.run([python, "-c", program], check=True, stderr=subprocess.DEVNULL)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)


def rows_that_fit(python, source, target, length):
    """Of the rows those that need not be cut: the recipe cuts long ones, `pipeline` leaves them out."""
    program = f"""
import json, sys
sys.path.insert(0, {str(RIVALS)!r})
from tokenizers import Tokenizer
from torchtune_tokenizer import PROMPT
tokenizer = Tokenizer.from_file({str(TOKENIZER / "tokenizer.json")!r})
size = lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
with open({str(target)!r}, "w") as file:
    for line in open({str(source)!r}):
        row = json.loads(line)
        if size(PROMPT.format(row["document"])) + size(row["summary"]) + 2 <= {length}:
            file.write(json.dumps({{"document": row["document"], "summary": row["summary"]}}) + "\\n")
"""
    subprocess.run([python, "-c", program], check=True)


def torchtune(python, folder, arguments):
    """The recipe `lora_finetune_single_device`; returns the losses, the seconds of its steps, and what it took."""
    config = folder / "recipe.yaml"
    config.write_text(recipe(folder, arguments))
    # The package `recipes` refuses to be imported, but it can be found.
    program = "import importlib.util as u; print(u.find_spec('recipes').submodule_search_locations[0])"
    recipes = subprocess.run([python, "-c", program], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    environment = {"OMP_NUM_THREADS": str(arguments.threads), "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": with_path(RIVALS)}
    command = [python, f"{recipes}/lora_finetune_single_device.py", "--config", config]
    measured = measure.run(command, environment)
    [log] = (folder / "out/logs").glob("log_*.txt")
    lines = [dict(word.split(":") for word in line.split("|")[1].split()) for line in log.read_text().splitlines()]
    return {
        "losses": [float(line["loss"]) for line in lines],
        # Learned tokens by the time since the last line.
        "rates": [float(line["tokens_per_second_per_gpu"]) for line in lines],
        "measured": measured,
    }


def with_path(folder):
    """PYTHONPATH with one more folder."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def recipe(folder, arguments):
    """torchtune's recipe for one device, on the CPU."""
    return f"""
tokenizer:
  _component_: torchtune_tokenizer.JsonTokenizer
  path: {folder}/model/tokenizer.json
  bos: {BOS}
  eos: {EOS}
  max_seq_len: {arguments.max_seq_len}
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1
  lora_attn_modules: [q_proj, v_proj]
  apply_lora_to_mlp: False
  apply_lora_to_output: False
  vocab_size: {SHAPE["vocab_size"]}
  num_layers: {SHAPE["num_hidden_layers"]}
  num_heads: {SHAPE["num_attention_heads"]}
  num_kv_heads: {SHAPE["num_key_value_heads"]}
  embed_dim: {SHAPE["hidden_size"]}
  max_seq_len: 8192
  intermediate_dim: {SHAPE["intermediate_size"]}
  attn_dropout: 0.0
  norm_eps: 1.0e-05
  rope_base: 500000
  scale_factor: 1
  lora_rank: 8
  lora_alpha: 16
  lora_dropout: 0.0
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: {folder}/model
  checkpoint_files: [model.safetensors]
  recipe_checkpoint: null
  output_dir: {folder}/out
  model_type: LLAMA3
resume_from_checkpoint: False
save_adapter_weights_only: True
dataset:
  _component_: torchtune.datasets.instruct_dataset
  source: json
  data_files: {folder}/rows.jsonl
  column_map: {{input: document, output: summary}}
  train_on_input: False
  packed: True
  split: train
seed: 0
shuffle: False
batch_size: 1
optimizer: {{_component_: torch.optim.AdamW, fused: False, weight_decay: 0.01, lr: 3e-4}}
lr_scheduler: {{_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 2}}
loss: {{_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}}
epochs: 1
max_steps_per_epoch: {arguments.steps}
gradient_accumulation_steps: 1
clip_grad_norm: 1.0
compile: False
output_dir: {folder}/out
metric_logger: {{_component_: torchtune.training.metric_logging.DiskLogger, log_dir: "{folder}/out/logs"}}
log_every_n_steps: 1
log_peak_memory_stats: False
device: cpu
dtype: fp32
enable_activation_checkpointing: False
enable_activation_offloading: False
profiler: {{_component_: torchtune.training.setup_torch_profiler, enabled: False}}
"""


def pipeline(folder, dtype, arguments):
    """The same as a pipeline: stages before the training first, so that the training alone is timed, too."""
    file = folder / f"{dtype}.yaml"
    file.write_text(json.dumps(declared(dtype, arguments)))
    environment = {"PIPELINE_HOME": str(folder / "home")}
    began = time.perf_counter()
    measure.run([measure.pipeline(), "run", file, "--until", "packs"], environment, cwd=folder)
    prepared = time.perf_counter() - began
    measured = measure.run([measure.pipeline(), "run", file], environment, cwd=folder)
    [metrics] = (folder / dtype).glob("**/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    log = measure.run([measure.pipeline(), "logs", "adapter"], environment, cwd=folder).output
    padded = [float(line.split(" padded tokens/s")[0].split()[-1]) for line in log.splitlines() if "padded tokens/s" in line]
    return {
        "losses": [step["loss"] for step in steps],
        "rates": [step["target_tokens"] * rate / arguments.max_seq_len for step, rate in zip(steps, padded)],
        "measured": measured,
        "prepared": prepared,
    }


def declared(dtype, arguments):
    """The pipeline, as JSON, which is YAML."""
    length = arguments.max_seq_len
    stages = {
        "base": ("download", {"path": "./model"}),
        "articles": (
            "dataset",
            {
                "source": "./rows.jsonl",
                "column_map": {"dialogue": "document", "output": "summary"},
                "template": "summarize",
            },
        ),
        "tokens": (
            "tokenize",
            {"dataset": "articles", "tokenizer": "base", "max_seq_len": length, "train_on_input": False},
        ),
        "packs": ("pack", {"tokens": "tokens", "max_seq_len": length}),
        "adapter": (
            "train",
            {
                "model": "base",
                "data": "packs",
                "method": "lora",
                "lora": {"rank": 8, "alpha": 16, "target_modules": ["q_proj", "v_proj"]},
                "optimizer": {"name": "adamw", "learning_rate": 3e-4, "weight_decay": 0.01},
                "scheduler": {"name": "cosine", "warmup_steps": 2},
                "clip_grad_norm": 1.0,
                "micro_batch_size": 1,
                "shuffle": False,
                "max_steps": arguments.steps,
                "dtype": dtype,
            },
        ),
    }
    document = {name: {"uses": kind, "with": settings} for name, (kind, settings) in stages.items()}
    document["adapter"]["resources"] = {"threads": arguments.threads}
    return {"version": 1, "name": "torchtune", "stages": document, "publish": {"adapter.metrics": f"./{dtype}"}}


def report(results):
    """Speeds, what each run took, and how far the losses are apart."""
    base = results["torchtune, f32"]
    tail = max(1, len(base["losses"]) - 10)
    print("| program | trained tokens/s | ratio | CPU-s in all | wall s in all | peak anonymous MiB |")
    print("|---|---|---|---|---|---|")
    for name, result in results.items():
        # The first step has the start in it.
        rate, rate_of_base = (measure.median(each["rates"][1:]) for each in (result, base))
        measured = result["measured"]
        print(
            f"| {name} | {rate:.1f} | {rate / rate_of_base:.2f} | {measured.cpu:.1f} | {measured.wall:.1f} "
            f"| {measured.peak_anon_mib:.0f} |"
        )
    print()
    for name, result in list(results.items())[1:]:
        first = abs(result["losses"][0] - base["losses"][0]) / base["losses"][0]
        ours, theirs = (sum(each["losses"][tail:]) / len(each["losses"][tail:]) for each in (result, base))
        print(f"{name}: first loss {result['losses'][0]:.6f}, torchtune's {base['losses'][0]:.6f}: apart {first:.1e}")
        print(f"    mean of the last {len(base['losses']) - tail}: {ours:.4f}, torchtune's {theirs:.4f}: apart {abs(ours - theirs) / theirs:.2%}")
        print(f"    rows to packs took {result['prepared']:.1f} s")


if __name__ == "__main__":
    main()
