#!/usr/bin/env python3
"""What each format of a model's weights costs, on one model that is trained here from the quickstart's text: bits, error, perplexity, memory, speed.

    cargo build --release
    python3 benches/formats.py [--pipeline target/release/pipeline] [--folder DIR] [--hidden 768] [--layers 8] [--epochs 1]

Prints a Markdown table, a row per format: bits per weight of the linear layers but the head, the largest of their errors (the norm of the difference over its own; known
of what `quantize` writes), the perplexity of text that was held out and what it is more than in f32, the peak memory of the stage that measures it, tokens a
second of greedy decoding of one prompt, loading included, and of four. Stages run one at a time. Everything is computed in f32, unless the row says bf16.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import measure

TOKENS = 192
PROMPTS = ["The", "A model", "Data", "When"]

# Name, bits per weight, what `evaluate` and `generate` are told.
IN_MEMORY = [
    ("f32", 32, {}),
    ("bf16", 16, {"dtype": "bf16"}),
    ("int8", 8.5, {"quantize": "int8"}),
    ("int4", 4.5, {"quantize": "int4"}),
    ("q8_0", 8.5, {"quantize": {"base": "q8_0"}}),
    ("nf4", 4.13, {"quantize": {"base": "nf4"}}),
    ("nf4, scales in f32", 4.5, {"quantize": {"base": "nf4", "double_quantization": False}}),
    ("fp4", 4.13, {"quantize": {"base": "fp4"}}),
    ("nf4_torchao", 4.13, {"quantize": {"base": "nf4_torchao"}}),
]
STORED = ["bnb_nf4", "bnb_fp4", "bnb_int8"]
GGUF = {"f16": 16, "q8_0": 8.5, "q6_k": 6.56, "q5_k_m": 5.5, "q5_0": 5.5, "q4_k_m": 4.5, "q4_0": 4.5}


def stages(options, text, held_out):
    """The model, and each format of it measured."""
    width = options.hidden
    made = {
        "text": {"uses": "dataset", "with": {"source": str(text)}},
        "held_out": {"uses": "dataset", "with": {"source": str(held_out)}},
        "fresh": {"uses": "new_model", "with": {
            "text": "text", "vocab_size": 1024, "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": options.layers,
            "num_attention_heads": width // 64, "num_key_value_heads": width // 128, "max_position_embeddings": 256, "seed": 1,
        }},
        "tokens": {"uses": "tokenize", "with": {"dataset": "text", "tokenizer": "fresh"}},
        "test": {"uses": "tokenize", "with": {"dataset": "held_out", "tokenizer": "fresh"}},
        "packs": {"uses": "pack", "with": {"tokens": "tokens", "max_seq_len": 128}},
        "model": {"uses": "train", "with": {
            "model": "fresh", "data": "packs", "method": "full", "dtype": "bf16", "micro_batch_size": 8, "epochs": options.epochs, "clip_grad_norm": 1.0,
            "optimizer": {"name": "adamw", "learning_rate": 1e-3, "weight_decay": 0.01}, "scheduler": {"name": "cosine", "warmup_steps": 10},
        }},
    }

    def measured(number, model, more):
        made[f"ppl{number}"] = {"uses": "evaluate", "with": {"model": model, "data": "held_out", "metrics": ["perplexity"], **more}}
        for count in (1, len(PROMPTS)):
            made[f"said{number}x{count}"] = {"uses": "generate", "with": {
                "model": model, "prompts": PROMPTS[:count], "max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "temperature": 0, **more,
            }}

    rows = []
    for name, bits, more in IN_MEMORY:
        rows.append((name, "in memory", bits, None))
        measured(len(rows), "model", more)
    for name in STORED:
        made[name] = {"uses": "quantize", "with": {"model": "model", "format": name, "data": "test"}}
        rows.append((name, "bitsandbytes' files", 8 if name.endswith("8") else 4.13, name))
    for name, bits in GGUF.items():
        made[f"gguf_{name}"] = {"uses": "gguf", "with": {"model": "model", "type": name, "pre_tokenizer": "gpt-2"}}
        made[f"read_{name}"] = {"uses": "download", "with": {"path": str(options.folder / "out" / name / "model.gguf"), "pre_tokenizer": "gpt-2"}}
        rows.append((name, "GGUF", bits, None))
        measured(len(rows), f"read_{name}", {})
    return made, rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", type=Path, default=measure.ROOT / "target/release/pipeline")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--hidden", type=int, default=768, help="a multiple of 256: the block of K-quants")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        options.folder = (options.folder or Path(name)).resolve()
        options.folder.mkdir(parents=True, exist_ok=True)
        bench(options)


def bench(options):
    lines = (measure.ROOT / "pipelines/quickstart/text.jsonl").read_text().splitlines()
    text, held_out = options.folder / "text.jsonl", options.folder / "held_out.jsonl"
    text.write_text("\n".join(line for at, line in enumerate(lines) if at % 20) + "\n")
    held_out.write_text("\n".join(lines[::20]) + "\n")
    made, rows = stages(options, text, held_out)
    written = {id: stage for id, stage in made.items() if stage["uses"] != "download" and not str(stage["with"].get("model")).startswith("read_")}
    publish = {**{f"gguf_{name}": f"./out/{name}" for name in GGUF}, **{name: f"./out/{name}" for name in STORED}}
    # The files are there before they are read.
    of = run(options, "write.yaml", {"version": 1, "stages": written, "publish": publish})
    of.update(run(options, "all.yaml", {"version": 1, "stages": made}))

    def facts(stage):
        return shown(options, stage)["facts"]

    base = facts("ppl1")["perplexity"]
    parameters = (options.folder / "out/f16/model.gguf").stat().st_size // 2
    print(f"hidden {options.hidden}, {options.layers} layers, about {parameters / 1e6:.0f} million weights; perplexity {base:.4f} in f32\n")
    print("| format | kept | bits | error | perplexity | more | memory, MiB | tokens/s of 1 | of 4 |\n|---|---|---|---|---|---|---|---|---|")
    for number, (name, kept, bits, stored) in enumerate(rows, 1):
        error, memory, speeds = "", "", ["", ""]
        if stored:
            report = json.loads((options.folder / "out" / stored / "quantize_report.json").read_text())
            perplexity, error = report["perplexity"]["after"], f"{max(tensor['relative_error'] for tensor in report['quantized']):.4f}"
        else:
            perplexity, memory = facts(f"ppl{number}")["perplexity"], f"{of[f'ppl{number}']['peak_memory_bytes'] / 2**20:.0f}"
            speeds = [f"{count * TOKENS / of[f'said{number}x{count}']['seconds']:.0f}" for count in (1, len(PROMPTS))]
        more = f"{100 * (perplexity / base - 1):+.2f} %"
        print(f"| `{name}` | {kept} | {bits:g} | {error} | {perplexity:.4f} | {more} | {memory} | {speeds[0]} | {speeds[1]} |")


def run(options, name, pipeline):
    """Runs a file, one stage at a time; what was recorded of the stages that ran."""
    (options.folder / name).write_text(json.dumps(pipeline))
    measure.run([options.pipeline, "run", name, "--jobs", "1", "--overwrite", "-q"], cwd=options.folder)
    view = json.loads(measure.run([options.pipeline, "runs", "show", "--format", "json"], cwd=options.folder).output)
    return {stage["stage"]: stage for stage in view["stages"] if stage["status"] == "done"}


def shown(options, stage):
    command = [options.pipeline, "show", "all.yaml", stage, "--format", "json"]
    return json.loads(subprocess.run(command, cwd=options.folder, check=True, capture_output=True).stdout)


if __name__ == "__main__":
    main()
