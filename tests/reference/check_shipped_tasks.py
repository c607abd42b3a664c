#!/usr/bin/env python3
"""The tasks of pipelines/tasks beside lm-evaluation-harness's own, on small rows of the shape that their datasets have.

    python3 tests/reference/check_shipped_tasks.py [--program target/release/pipeline]

Each task is asked without and with two shots. It needs lm_eval, transformers, torch, datasets and pyarrow. It prints a line per task: whether every request
is equal, how far log-likelihoods and figures are apart at most; it fails where a request differs, a log-likelihood by 2e-3, or a figure by 1e-4 of itself.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import lm_eval  # noqa: E402
import pyarrow.parquet  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests/golden/evaltasks/model"
THEIRS = Path(lm_eval.__file__).parent / "tasks"
# Prompts of these are whole without shots.
WITHOUT_SHOTS = ("truthful", "lambada", "wikitext")


def arc(n: int) -> list[dict]:
    return [
        {
            "id": str(i),
            "question": f"What is {i} and {i}?",
            "choices": {"text": [str(2 * i), str(i), "a lot", "none"][: 3 + i % 2], "label": ["A", "B", "C", "D"][: 3 + i % 2]},
            "answerKey": "ABC"[i % 3],
        }
        for i in range(n)
    ]


def mmlu(n: int) -> list[dict]:
    return [{"question": f" How many are {i} and 1? ", "subject": "anatomy", "choices": ["one", "two", str(i + 1), "four"], "answer": i % 4} for i in range(n)]


def chinese(n: int, q: str, a: str) -> list[dict]:
    return [{q: f" {i}加一是多少？", "A": "一", "B": "二", "C": str(i + 1), "D": "四", a: "ABCD"[i % 4]} for i in range(n)]


ROWS = {
    "arc_easy": ("arc/arc_easy.yaml", "ai2_arc/ARC-Easy", {"train": arc(4), "validation": arc(3), "test": arc(5)}),
    "hellaswag": (
        "hellaswag/hellaswag.yaml",
        "hellaswag",
        {
            "train": [
                {
                    "activity_label": "Roof",
                    "ctx_a": "A man sits.",
                    "ctx_b": "he STARTS",
                    "endings": ["[header] Go [title] on.", "stop it", "run", "eat  well"],
                    "label": "2",
                }
            ]
            * 3,
            "validation": [
                {"activity_label": "Bath", "ctx_a": "A dog", "ctx_b": "", "endings": ["barks.", "[step] sleeps.", "swims", "flies"], "label": "0"},
                {"activity_label": "Cook", "ctx_a": "She [substeps] stirs", "ctx_b": "the soup Is", "endings": ["hot.", "cold.", "gone", "red"], "label": "3"},
            ],
        },
    ),
    "truthfulqa_mc1": (
        "truthfulqa/truthfulqa_mc1.yaml",
        "truthful_qa/multiple_choice",
        {
            "validation": [
                {
                    "question": "Is it so?",
                    "mc1_targets": {"choices": ["Yes", "No"], "labels": [1, 0]},
                    "mc2_targets": {"choices": ["Yes", "It is", "No"], "labels": [1, 1, 0]},
                },
                {
                    "question": "Who?",
                    "mc1_targets": {"choices": ["Me", "You", "All"], "labels": [1, 0, 0]},
                    "mc2_targets": {"choices": ["Me", "You"], "labels": [1, 0]},
                },
            ]
        },
    ),
    "truthfulqa_mc2": ("truthfulqa/truthfulqa_mc2.yaml", "truthful_qa/multiple_choice", None),
    "winogrande": (
        "winogrande/default.yaml",
        "winogrande/winogrande_xl",
        {
            "train": [{"sentence": "The cup fell off the table since _ was high.", "option1": "cup", "option2": "table", "answer": "2"}] * 3,
            "validation": [
                {"sentence": "Ann's book pleased Bo since _ likes books.", "option1": "Ann", "option2": "Bo", "answer": "2"},
                {"sentence": "The ball broke it's window because _ 'was' \"soft\" and _ too.", "option1": "ball", "option2": "the window", "answer": "1"},
            ],
        },
    ),
    "piqa": (
        "piqa/piqa.yaml",
        "piqa",
        {
            "train": [{"goal": "g", "sol1": "a", "sol2": "b", "label": 0}] * 3,
            "validation": [
                {"goal": "To open a jar,", "sol1": "turn the lid.", "sol2": 'hit it\'s "side".', "label": 0},
                {"goal": "To sleep", "sol1": "run", "sol2": "lie down", "label": 1},
            ],
        },
    ),
    "boolq": (
        "super_glue/boolq/default.yaml",
        "super_glue/boolq",
        {
            "train": [{"passage": "p", "question": "q", "idx": 0, "label": 1}] * 3,
            "validation": [
                {"passage": "The sun is hot.", "question": "is the sun hot", "idx": 0, "label": 1},
                {"passage": "Ice is cold.", "question": "is ice hot", "idx": 1, "label": 0},
            ],
        },
    ),
    "lambada_openai": (
        "lambada/lambada_openai.yaml",
        "lambada_openai/default",
        {"test": [{"text": "He went to the old house and opened the door"}, {"text": "She said that she was fine"}]},
    ),
    "wikitext": (
        "wikitext/wikitext.yaml",
        "wikitext_document_level/wikitext-2-raw-v1",
        {
            "train": [{"page": "x"}],
            "validation": [{"page": "x"}],
            "test": [
                {"page": " = Robert = \n He , a \" great \" man ( born 1 @.@ 5 m ) , said : ' yes ' . \n"},
                {"page": " well @-@ known words and more of them than before . \n"},
            ],
        },
    ),
    "mmlu_anatomy": ("mmlu/default/mmlu_anatomy.yaml", "mmlu/anatomy", {"dev": mmlu(6), "test": mmlu(5)}),
    "ceval-valid_law": ("ceval/ceval-valid_law.yaml", "ceval-exam/law", {"dev": chinese(5, "question", "answer"), "val": chinese(4, "question", "answer")}),
    "cmmlu_anatomy": ("cmmlu/cmmlu_anatomy.yaml", "cmmlu/anatomy", {"dev": chinese(5, "Question", "Answer"), "test": chinese(4, "Question", "Answer")}),
    "gsm8k": (
        "gsm8k/gsm8k.yaml",
        "gsm8k/main",
        {
            "train": [{"question": f"What is {i}+1?", "answer": f"It is {i}+1. #### {i + 1}"} for i in range(7)],
            "test": [{"question": "What is 2+2?", "answer": "#### 4"}, {"question": "What is 1+1?", "answer": "#### 2"}],
        },
    ),
}


def write(folder: Path) -> None:
    """The rows of each task, and the harness's own task files over them."""
    (folder / "theirs").mkdir()
    before = None
    for task, (yaml, where, data) in ROWS.items():
        data = before = data or before
        place = folder / "task_data" / where
        place.mkdir(parents=True, exist_ok=True)
        files = {}
        for split, rows in data.items():
            files[split] = str(place / f"{split}.jsonl")
            Path(files[split]).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        lines = [f"include: {THEIRS / yaml}", f"task: own_{task}", "dataset_path: json", "dataset_name: null"]
        lines.append(f"dataset_kwargs: {json.dumps({'data_files': files})}")
        (folder / "theirs" / f"own_{task}.yaml").write_text("\n".join(lines) + "\n")


def ours(program: str, folder: Path, tasks: list[str], shots: int) -> dict:
    scores = {"model": "model", "tasks": tasks, "task_data": str(folder / "task_data"), "num_fewshot": shots}
    stages = {"model": {"uses": "download", "with": {"path": str(MODEL)}}, "scores": {"uses": "evaluate", "with": scores}}
    (folder / "job.yaml").write_text(json.dumps({"version": 1, "name": "shipped", "stages": stages, "publish": {"scores": "./scores"}}))
    command = [program, "run", str(folder / "job.yaml"), "-q", "--overwrite", "--home", str(folder / "home")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / "scores/metrics.json").read_text())["results"]


def theirs(folder: Path, tasks: list[str], shots: int) -> dict:
    positions = json.loads((MODEL / "config.json").read_text())["max_position_embeddings"]
    language_model = HFLM(pretrained=str(MODEL), dtype="float32", device="cpu", batch_size=1, max_length=positions)
    manager = TaskManager(include_path=str(folder / "theirs"), include_defaults=False)
    names = [f"own_{task}" for task in tasks]
    return lm_eval.simple_evaluate(
        language_model, tasks=names, task_manager=manager, num_fewshot=shots, log_samples=True, fewshot_random_seed=1234, bootstrap_iters=1000
    )


def differs(folder: Path, task: str, found: dict, reference: dict) -> bool:
    # A row is there once for each filter.
    rows = {row["doc_id"]: row for row in reference["samples"][f"own_{task}"]}
    samples = pyarrow.parquet.read_table(folder / f"scores/samples_{task}.parquet").to_pylist()
    same, apart = len(rows) == len(samples), 0.0
    for sample in samples:
        row = rows[sample["doc_id"]]
        asked = [[text for text in arguments if isinstance(text, str)] for arguments in row["arguments"]]
        same &= json.loads(sample["arguments"]) == asked
        for answer, (response,) in zip(json.loads(sample["resps"]), row["resps"], strict=True):
            if isinstance(answer, str):
                same &= answer == response
            else:
                apart = max(apart, abs(answer[0] - float(response[0] if isinstance(response, (tuple, list)) else response)))
    figures = {key: value for key, value in reference["results"][f"own_{task}"].items() if "," in key and "stderr" not in key}
    off = max(abs(found[key] - value) / max(1, abs(value)) for key, value in figures.items())
    wrong = not same or apart > 2e-3 or off > 1e-4
    print(
        f"{'FAILS' if wrong else 'ok   '} {task}: requests {'equal' if same else 'differ'}, log-likelihoods {apart:.1e}, {len(figures)} figures {off:.1e}",
        flush=True,
    )
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=str(ROOT / "target/release/pipeline"))
    program = parser.parse_args().program
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        for shots in (0, 2):
            print(f"{shots} shots")
            tasks = [task for task in ROWS if not shots or not task.startswith(WITHOUT_SHOTS)]
            found, reference = ours(program, folder, tasks, shots), theirs(folder, tasks, shots)
            failed += sum(differs(folder, task, found[task], reference) for task in tasks)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
