#!/usr/bin/env python3
"""Runs lm-evaluation-harness itself beside `evaluate: { tasks }` on a local checkpoint, and compares every figure and every sample.

    python3 tests/reference/check_harness.py [--model FOLDER] [--tasks FOLDER] [--program target/release/pipeline]

By default the checkpoint and the tasks are those of tests/golden/evaltasks; tests/reference/harness/tasks has others, and a group. It needs lm_eval, transformers, torch and datasets. It prints a line per task:
figures and samples compared, and how far log-likelihoods are apart at most; it fails where a figure differs by more than 1e-6 (of itself, above 1), or a log-likelihood by 2e-3.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# What `Dataset.map` has made of rows once, with random numbers of another evaluation, is not to be found again.
CACHE = tempfile.TemporaryDirectory()
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", HF_DATASETS_CACHE=CACHE.name)

import pyarrow.parquet  # noqa: E402
from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden/evaltasks"
# The harness draws 100,000 times for a bootstrap, and so do we.
FIGURES, LOGLIKELIHOODS = 1e-6, 2e-3


def ours(program: str, model: Path, tasks: list[Path], data: Path, folder: Path) -> dict:
    stages = {
        "model": {"uses": "download", "with": {"path": str(model)}},
        "scores": {
            "uses": "evaluate",
            "with": {"model": "model", "tasks": [str(task) for task in tasks], "task_data": str(data), "task_functions": True, "max_seq_len": 192},
        },
    }
    file = folder / "job.yaml"
    file.write_text(json.dumps({"version": 1, "name": "harness", "stages": stages, "publish": {"scores": "./scores"}}))
    environment = os.environ | {"PIPELINE_PYTHON": sys.executable}
    command = [program, "run", str(file), "-q", "--home", str(folder / "home")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return json.loads((folder / "scores/metrics.json").read_text())


def theirs(model: Path, names: list[str], folder: Path) -> dict:
    language_model = HFLM(pretrained=str(model), dtype="float32", device="cpu", batch_size=1, max_length=192)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = {"results": {}, "samples": {}}
    # Each alone: what functions draw there depends on what ran before.
    for name in names:
        evaluated = simple_evaluate(
            language_model,
            tasks=[name],
            task_manager=manager,
            log_samples=True,
            random_seed=0,
            numpy_random_seed=1234,
            torch_random_seed=1234,
            fewshot_random_seed=1234,
        )
        for part, of_part in found.items():
            of_part.update(evaluated[part])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=str(ROOT / "target/release/pipeline"))
    parser.add_argument("--model", type=Path, default=GOLDEN / "model")
    parser.add_argument("--tasks", type=Path, default=GOLDEN / "tasks")
    arguments = parser.parse_args()
    arguments.tasks, arguments.model = arguments.tasks.resolve(), arguments.model.resolve()
    # Chat templates are an option of a whole evaluation, and the golden tests have those; a generation's text is decoded, not scored.
    names = [path.stem for path in sorted(arguments.tasks.glob("*.yaml")) if not path.stem.startswith(("_", "chat_", "gsm", "trivia"))]
    os.chdir(arguments.tasks.parent)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        found = ours(
            arguments.program,
            arguments.model,
            [arguments.tasks / f"{name}.yaml" for name in names],
            arguments.tasks.parent,
            Path(folder),
        )
        files = {name: Path(folder) / f"scores/samples_{name}.parquet" for name in names}
        samples = {name: pyarrow.parquet.read_table(file).to_pylist() for name, file in files.items() if file.exists()}
    reference = theirs(arguments.model, names, arguments.tasks)
    for name in names:
        compared, apart, worst = 0, 0.0, 0.0
        for key, value in reference["results"][name].items():
            if "," not in key or not isinstance(value, (int, float)):
                continue
            compared += 1
            worst = max(worst, abs(found["results"][name][key] - value) / max(1, abs(value)))
        # A row is there once for each filter; a group has none.
        rows = reference["samples"].get(name, [])
        rows = [row for row in rows if row["filter"] == rows[0]["filter"]]
        for row, sample in zip(sorted(rows, key=lambda row: row["doc_id"]), samples.get(name, []), strict=True):
            answers = json.loads(sample["resps"])
            if len(answers) != len(row["resps"]):
                sys.exit(f"{name}: {len(answers)} answers, and the harness has {len(row['resps'])}")
            for answer, (response,) in zip(answers, row["resps"], strict=True):
                if isinstance(answer, str):
                    if answer != response:
                        sys.exit(f"{name}: {answer!r}, and the harness has {response!r}")
                    continue
                expected = response[0] if isinstance(response, (list, tuple)) else response
                apart = max(apart, abs(answer[0] - float(expected)))
        # Figures follow log-likelihoods, which differ in their last digits.
        wrong = apart > LOGLIKELIHOODS or worst > max(FIGURES, 100 * apart)
        failed += wrong
        print(
            f"{'FAILS' if wrong else 'ok   '} {name}: {compared} figures, {len(rows)} rows, log-likelihoods {apart:.1e} and figures {worst:.1e} apart at most",
            flush=True,
        )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
