#!/usr/bin/env python3
"""Questions of four choices scored by lm-evaluation-harness (the hf backend) and by `pipeline run` in turn, on the same checkpoint and rows.

    python3 -m venv rivals && rivals/bin/pip install torch transformers lm_eval pyarrow
    cargo build --release
    RIVAL_PYTHON=rivals/bin/python python3 benches/tasks.py [--dtype f32] [--stored bf16] [--questions 1000] [--num-fewshot 0] [--rounds 1]

The checkpoint is made up: SmolLM-135M's shape with its vocabulary of 49,152, its weights stored as f32 or bf16, the tokenizer that of `tests/golden/data/tokenizers/bytelevel`. The
questions are sentences of this project's own docs, and the four choices what follows one of them and three others, as in HellaSwag. lm-eval gets
the batch size that scores the first 32 questions fastest. The log-likelihoods of both are compared. In each round every program runs once.
Prints a Markdown table: seconds and processor seconds of the whole program and of the questions alone (those of a program that scores one question
are taken off), memory, and the ratios.
"""

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
from pathlib import Path

import measure
from torchtune import SHAPE, make_checkpoint

RIVAL = Path(__file__).parent / "rivals/lm_eval_tasks.py"
TASK = """
task: beside
dataset_path: json
dataset_kwargs: { data_files: { test: rows.jsonl, train: shown.jsonl } }
test_split: test
training_split: train
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{endings}}"
doc_to_target: label
metric_list: [{ metric: acc }, { metric: acc_norm }]
"""
BATCH_SIZES = [1, 4, 16, 64]
DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--stored", choices=["f32", "bf16"], default="f32", help="what the checkpoint holds")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--num-fewshot", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--batch-size", type=int, help="of lm-eval; the best one if left out")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    SHAPE["vocab_size"] = 49152
    python = measure.python_with("torch", "transformers", "lm_eval", "pyarrow")
    if python is None:
        sys.exit("no torch, transformers, lm_eval and pyarrow: RIVAL_PYTHON names a Python that has them")
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        make_checkpoint(python, folder / "model", tied=True, dtype=DTYPES[arguments.stored])
        (folder / "task.yaml").write_text(TASK)
        write_rows(folder / "shown.jsonl", 40, seed=1)
        best = arguments.batch_size
        if best is None:
            seconds = {size: theirs(python, folder, 32, size, arguments).wall for size in BATCH_SIZES}
            best = min(seconds, key=seconds.get)
            print(f"lm-eval scores 32 questions fastest in batches of {best}: {seconds}", file=sys.stderr)
        programs = {
            "pipeline": lambda questions: ours(folder, questions, arguments),
            "lm-eval": lambda questions: theirs(python, folder, questions, best, arguments),
        }
        fixed = {name: program(1) for name, program in programs.items()}
        results = {name: [] for name in programs}
        for _ in range(arguments.rounds):
            for name, program in programs.items():
                results[name].append(program(arguments.questions))
        report(results, fixed, farthest(python, folder))


def write_rows(path, count, seed=0):
    """Questions made of sentences of the docs."""
    texts = [document.read_text() for document in sorted((measure.ROOT / "docs").glob("*.md"))]
    prose = " ".join(re.sub(r"(?s)```.*?```|\|[^\n]*\|", " ", text) for text in texts)
    sentences = [sentence.strip() for sentence in re.split(r"(?<=[.!?])\s+", re.sub(r"\s+", " ", prose))]
    sentences = [sentence for sentence in sentences if 40 <= len(sentence) <= 160]
    draw = random.Random(seed)
    with open(path, "w") as file:
        for _ in range(count):
            at = draw.randrange(len(sentences) - 2)
            endings = [sentences[at + 2], *(draw.choice(sentences) for _ in range(3))]
            row = {"context": f"{sentences[at]} {sentences[at + 1]}", "endings": endings, "label": 0}
            print(json.dumps(row), file=file)


def ours(folder, questions, arguments):
    """A run of a pipeline whose model is in the store already, and that has no answers to take over."""
    write_rows(folder / "rows.jsonl", questions)
    scores = {"model": "base", "tasks": ["./task.yaml"], "task_data": ".", "num_fewshot": arguments.num_fewshot, "dtype": arguments.dtype}
    stages = {
        "base": {"uses": "download", "with": {"path": "./model"}},
        "scores": {"uses": "evaluate", "with": scores, "resources": {"threads": arguments.threads}},
    }
    (folder / "job").mkdir(exist_ok=True)
    for name in ("task.yaml", "rows.jsonl", "shown.jsonl"):
        (folder / "job" / name).write_text((folder / name).read_text())
    stages["base"]["with"]["path"] = "../model"
    file = folder / "job/job.yaml"
    file.write_text(json.dumps({"version": 1, "name": "beside", "stages": stages, "publish": {"scores": f"../ours-{questions}"}}))
    shutil.rmtree(folder / "home", ignore_errors=True)
    environment = {"PIPELINE_HOME": str(folder / "home")}
    measure.run([measure.pipeline(), "run", file, "--until", "base"], environment)
    return measure.run([measure.pipeline(), "run", file, "--overwrite"], environment)


def theirs(python, folder, questions, batch_size, arguments):
    """A run of lm-eval."""
    write_rows(folder / "rows.jsonl", questions)
    job = {
        "folder": str(folder), "dtype": DTYPES[arguments.dtype], "batch_size": batch_size,
        "threads": arguments.threads, "num_fewshot": arguments.num_fewshot,
    }  # fmt: skip
    # Threads that wait by spinning would count as work.
    environment = {"OMP_NUM_THREADS": str(arguments.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return measure.run([python, RIVAL, json.dumps(job)], environment, cwd=folder)


def farthest(python, folder):
    """How far the log-likelihoods of the last runs are apart at most."""
    program = f"""
import glob, json, pyarrow.parquet
theirs = json.load(open({str(folder / "theirs.json")!r}))
[path] = glob.glob({str(folder)!r} + f"/ours-{{len(theirs)}}/samples_beside.parquet")
ours = [[answer[0] for answer in json.loads(row)] for row in pyarrow.parquet.read_table(path)["resps"].to_pylist()]
assert len(ours) == len(theirs)
print(max(abs(a - b) for one, other in zip(ours, theirs) for a, b in zip(one, other)))
"""
    return float(measure.run([python, "-c", program]).output)


def report(results, fixed, apart):
    """What each took, and the ratios."""
    print("| program | s in all | CPU-s in all | s of the questions | CPU-s of the questions | peak anonymous MiB |")
    print("|---|---|---|---|---|---|")
    rows = {}
    for name, rounds in results.items():
        wall, cpu = (measure.median([getattr(each, key) for each in rounds]) for key in ("wall", "cpu"))
        memory = max(each.peak_anon_mib for each in rounds)
        rows[name] = (wall, cpu, wall - fixed[name].wall, cpu - fixed[name].cpu, memory)
        print(f"| {name} | " + " | ".join(f"{value:.1f}" for value in rows[name]) + " |")
    ratios = [its / own for its, own in zip(rows["lm-eval"], rows["pipeline"], strict=True)]
    print("| lm-eval to pipeline | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    print(f"\nlog-likelihoods are {apart:.1e} apart at most")


if __name__ == "__main__":
    main()
