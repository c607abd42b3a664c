#!/usr/bin/env python3
"""DPO steps of TRL's DPOTrainer and of `pipeline run` in turn, on the same checkpoint, adapter and pairs; and beside a step of fine-tuning.

    python3 -m venv rivals && rivals/bin/pip install torch transformers peft trl
    cargo build --release
    RIVAL_PYTHON=rivals/bin/python python3 benches/preference.py --rows PAIRS.jsonl [--dtype f32] [--steps 12] [--rounds 3]

`--rows` is a JSONL file with the texts `prompt`, `chosen` and `rejected`. The checkpoint is made up: a Llama of SmolLM-135M's shape with the
vocabulary of `tests/golden/data/tokenizers/bytelevel`; the adapter is a fresh one of PEFT's, which both go on from, so that their losses
are to be equal. Both take pairs that need not be cut, in their order, with the reference scored beforehand (TRL: `precompute_ref_log_probs`),
and TRL, too, as it is by default, scoring the reference in each step. `pipeline, cross entropy` trains on the same documents, two rows for a
pair: what a step costs without preferences. In each round every program runs once. Prints a Markdown table, of medians over the rounds of
the median step (the first is left out), the ratio of each, and how far the losses are apart. Where TRL is not installed it is left out.
"""

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path

import measure
from torchtune import SHAPE, TOKENIZER, make_checkpoint

RIVAL = Path(__file__).parent / "rivals/trl_dpo.py"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RATE, BETA = 1e-3, 0.1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--pairs", type=int, default=2, help="of a step")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-seq-len", type=int, default=512)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    SHAPE["num_hidden_layers"] = arguments.layers
    python = measure.python_with("torch", "transformers", "peft", "tokenizers")
    if python is None:
        sys.exit("no torch, transformers and peft: RIVAL_PYTHON names a Python that has them")
    trl = measure.python_with("trl")
    if trl is None:
        print("trl is not installed for that Python, and is left out", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        make_checkpoint(python, folder / "model")
        measure.run([python, RIVAL, "adapter", folder, ",".join(TARGETS)])
        write_rows(python, folder, arguments)
        programs = {
            "pipeline": lambda: ours(folder, "dpo", arguments),
            "pipeline, cross entropy": lambda: ours(folder, "cross_entropy", arguments),
        }
        if trl is not None:
            programs["TRL, reference scored before"] = lambda: theirs(trl, folder, True, arguments)
            programs["TRL"] = lambda: theirs(trl, folder, False, arguments)
        results = {name: [] for name in programs}
        for _ in range(arguments.rounds):
            for name, program in programs.items():
                results[name].append(program())
    report(results)


def write_rows(python, folder, arguments):
    """The pairs that need not be cut, and their documents as ordinary rows."""
    count = arguments.pairs * arguments.steps
    program = f"""
import json
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file({str(TOKENIZER / "tokenizer.json")!r})
size = lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
left = {count}
with open({str(folder / "pairs.jsonl")!r}, "w") as pairs, open({str(folder / "rows.jsonl")!r}, "w") as rows:
    for line in open({str(arguments.rows.resolve())!r}):
        row = {{key: json.loads(line)[key] for key in ("prompt", "chosen", "rejected")}}
        if left == 0 or any(size(row["prompt"] + row[side]) + 2 > {arguments.max_seq_len} for side in ("chosen", "rejected")):
            continue
        left -= 1
        print(json.dumps(row), file=pairs)
        for side in ("chosen", "rejected"):
            print(json.dumps({{"prompt": row["prompt"], "response": row[side]}}), file=rows)
assert left == 0, f"{{left}} pairs too few, of at most {arguments.max_seq_len} tokens"
"""
    measure.run([python, "-c", program])


def ours(folder, loss, arguments):
    """A run of a pipeline: what comes before the training first, so that the training alone is timed."""
    file = folder / "job.yaml"
    file.write_text(json.dumps(declared(loss, arguments)))
    environment = {"PIPELINE_HOME": str(folder / "home")}
    measure.run([measure.pipeline(), "run", file, "--until", "reference" if loss == "dpo" else "tokens"], environment, cwd=folder)
    measured = measure.run([measure.pipeline(), "run", file, "--force", "trained", "--overwrite"], environment, cwd=folder)
    steps = [json.loads(line) for line in (folder / loss / "metrics.jsonl").read_text().splitlines()]
    log = measure.run([measure.pipeline(), "logs", "trained"], environment, cwd=folder).output
    rates = [float(rate) for rate in re.findall(r"([0-9.]+) tokens/s", log)]
    return {
        "losses": [step["loss"] for step in steps],
        "grad_norms": [step["grad_norm"] for step in steps],
        "tokens": [step["tokens"] for step in steps],
        "seconds": [step["tokens"] / rate for step, rate in zip(steps, rates, strict=True)],
        "measured": measured,
    }


def declared(loss, arguments):
    """The pipeline, as JSON, which is YAML."""
    pairs = loss == "dpo"
    tokens = {"dataset": "rows", "tokenizer": "base", "max_seq_len": arguments.max_seq_len, "add_bos": False, "add_eos": True}
    train = {
        "model": "base",
        "data": "tokens",
        "adapter": "fresh",
        "optimizer": {"name": "adamw", "learning_rate": RATE, "weight_decay": 0.01},
        "scheduler": {"name": "constant"},
        "clip_grad_norm": 1.0,
        "micro_batch_size": arguments.pairs * (1 if pairs else 2),
        "shuffle": False,
        "dtype": arguments.dtype,
    }
    stages = {"base": ("download", {"path": "./model"}), "fresh": ("download", {"path": "./adapter", "as": "adapter"})}
    if pairs:
        stages["rows"] = ("dataset", {"source": "./pairs.jsonl"})
        stages["tokens"] = ("tokenize", {**tokens, "response_border": "joint"})
        stages["reference"] = ("log_probs", {"model": "base", "adapter": "fresh", "data": "tokens", "dtype": arguments.dtype})
        train |= {"loss": {"name": "dpo", "beta": BETA}, "reference": {"log_probs": "reference"}}
    else:
        columns = {"prompt": "prompt", "output": "response"}
        stages["rows"] = ("dataset", {"source": "./rows.jsonl", "column_map": columns, "template": "{prompt}"})
        stages["tokens"] = ("tokenize", {**tokens, "train_on_input": False})
    stages["trained"] = ("train", train)
    document = {name: {"uses": kind, "with": settings} for name, (kind, settings) in stages.items()}
    document["trained"]["resources"] = {"threads": arguments.threads}
    return {"version": 1, "name": "preference", "stages": document, "publish": {"trained.metrics": f"./{loss}"}}


def theirs(python, folder, precomputed, arguments):
    """A run of the DPOTrainer."""
    job = {
        "folder": str(folder), "dtype": arguments.dtype, "pairs": arguments.pairs, "steps": arguments.steps, "beta": BETA,
        "learning_rate": RATE, "max_length": arguments.max_seq_len, "threads": arguments.threads, "precomputed": precomputed,
    }  # fmt: skip
    measured = measure.run([python, RIVAL, "train", json.dumps(job)])
    return {**measured.json(), "measured": measured}


def report(results):
    """Steps, what the whole process took, and how far the losses are apart."""
    print("| program | tokens of a step | s a step | spread | ours to its | CPU-s in all | peak anonymous MiB | greatest distance of a loss |")
    print("|---|---|---|---|---|---|---|---|")
    base = results["pipeline"]
    seconds = {name: [measure.median(each["seconds"][1:]) for each in rounds] for name, rounds in results.items()}
    for name, rounds in results.items():
        same = name.startswith("TRL")
        apart = max(abs(a - b) for a, b in zip(base[0]["losses"], rounds[0]["losses"], strict=True)) if same else None
        ratio = measure.median([its / own for its, own in zip(seconds[name], seconds["pipeline"], strict=True)])
        print(
            f"| {name} | {measure.median(rounds[0]['tokens']):.0f} | {measure.median(seconds[name]):.3f} | ±{100 * measure.spread(seconds[name]):.0f} % "
            f"| {ratio:.2f} | {measure.median([each['measured'].cpu for each in rounds]):.1f} "
            f"| {max(each['measured'].peak_anon_mib for each in rounds):.0f} | {'' if apart is None else f'{apart:.1e}'} |"
        )


if __name__ == "__main__":
    main()
