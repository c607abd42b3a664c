#!/usr/bin/env python3
"""lm-evaluation-harness, by its `local-completions`, against `pipeline serve`, beside the same task of an `evaluate` stage.

    python3 -m venv harness && harness/bin/pip install 'lm-eval[api]' transformers
    cargo build --release
    harness/bin/python scripts/check_serve_tasks.py [--rows 100]

The task is made of the quickstart's text: which of four ends a sentence has. The model is the quickstart's before any training, whose figures are not all
or nothing. Both are to give the same accuracies and errors. Nothing is needed from the network.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIPELINE = Path(os.environ.get("PIPELINE", ROOT / "target/release/pipeline"))
WORDS = 4
FILE = """
version: 1
stages:
  text:
    uses: dataset
    with: {{ source: {text} }}
  fresh:
    uses: new_model
    with:
      {{ text: text, vocab_size: 1024, hidden_size: 192, intermediate_size: 512, num_hidden_layers: 4, num_attention_heads: 6,
         num_key_value_heads: 2, max_position_embeddings: 256, seed: 1 }}
  scores:
    uses: evaluate
    with: {{ model: fresh.model, tasks: ./tasks/ends.yaml, task_data: ./tasks }}
publish: {{ fresh.model: ./model, scores: ./scores }}
"""
TASK = """
task: ends
dataset_path: json
dataset_kwargs: {{ data_files: {{ test: {rows} }} }}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
metric_list:
  - {{ metric: acc, aggregation: mean, higher_is_better: true }}
  - {{ metric: acc_norm, aggregation: mean, higher_is_better: true }}
metadata: {{ version: 1 }}
"""


def make_task(folder, count, draw):
    texts = [next(iter(json.loads(line).values())) for line in (ROOT / "pipelines/quickstart/text.jsonl").read_text().splitlines()]
    texts = [text.split(" ") for text in texts if text.count(" ") >= 3 * WORDS]

    def some_words():
        words = draw.choice(texts)
        begin = draw.randrange(len(words) - WORDS)
        return " ".join(words[begin : begin + WORDS])

    rows = []
    for _ in range(count):
        words = draw.choice(texts)
        at = draw.randrange(WORDS, min(len(words) - WORDS, 40))
        end = " ".join(words[at : at + WORDS])
        choices = [end]
        while len(choices) < 4:
            other = some_words()
            choices += [other] if other not in choices else []
        draw.shuffle(choices)
        rows.append({"question": " ".join(words[:at]), "choices": choices, "gold": choices.index(end)})
    # The harness reads paths from where it runs, a stage from the folder of its data.
    for name, path in (("tasks", "rows.jsonl"), ("harness", folder / "tasks/rows.jsonl")):
        (folder / name).mkdir()
        (folder / name / "ends.yaml").write_text(TASK.format(rows=path))
    (folder / "tasks/rows.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def of_harness(folder):
    command = [PIPELINE, "serve", "--model", folder / "model", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            address = next(line for line in server.stderr if line.startswith("serving ")).rsplit(" at ", 1)[1].strip()
            model = f"base_url={address}/completions,model=model,tokenizer={folder / 'model'},tokenizer_backend=huggingface,num_concurrent=8,max_length=256"
            subprocess.run(
                [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", model, "--tasks", "ends",
                 "--include_path", folder / "harness", "--output_path", folder / "results.json"],
                check=True, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")},
            )  # fmt: skip
        finally:
            server.kill()
    found = next(folder.glob("results*.json"))
    return json.loads(found.read_text())["results"]["ends"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_task(folder, options.rows, random.Random(1))
        (folder / "check.yaml").write_text(FILE.format(text=ROOT / "pipelines/quickstart/text.jsonl"))
        subprocess.run([PIPELINE, "run", "-q", folder / "check.yaml"], check=True, stdout=subprocess.DEVNULL)
        ours, theirs = json.loads((folder / "scores/metrics.json").read_text())["results"]["ends"], of_harness(folder)
        for metric in ("acc", "acc_norm"):
            found, expected = ([figures[f"{what},none"] for what in (metric, f"{metric}_stderr")] for figures in (theirs, ours))
            print(f"{metric}: {found[0]:.4f} ± {found[1]:.4f} by the harness, {expected[0]:.4f} ± {expected[1]:.4f} by `evaluate`")
            if any(abs(one - other) > 1e-9 for one, other in zip(found, expected)):
                raise SystemExit("they differ")


if __name__ == "__main__":
    main()
