"""Makes tests/golden/evaltasks/responses.json: what lm-evaluation-harness makes of given responses to generations.

    python3 tests/reference/make_golden_responses.py      # needs lm_eval (0.4.13 was used), datasets, scikit-learn

A model stands in that answers from a list, so that filters over several responses (`repeats`), `f1` and `mcc` are compared without drawing a token.
Multiple choice is there for `mcc` of more than two choices. Every case has its task file as text, its rows, the responses to each row, and the figures.
"""

import json
import os
import tempfile
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")

import yaml  # noqa: E402
from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.api.model import LM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

OUT = Path(__file__).resolve().parents[2] / "tests/golden/evaltasks/responses.json"
DRAWS = 1000


class Told(LM):
    """Answers a prompt with the next of its responses, and a choice with its log-likelihood."""

    def __init__(self, answers: dict[str, list]) -> None:
        super().__init__()
        self.answers = {prompt: list(given) for prompt, given in answers.items()}

    def generate_until(self, requests, disable_tqdm=False):
        return [self.answers[request.args[0]].pop(0) for request in requests]

    def loglikelihood(self, requests, disable_tqdm=False):
        return [tuple(self.answers[request.args[0]].pop(0)) for request in requests]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise NotImplementedError


def task(name: str, **keys) -> dict:
    base = {
        "task": name,
        "dataset_path": "json",
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{t}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
    }
    return {**base, **keys}


SAMPLES = {"until": ["\n"], "max_gen_toks": 8, "do_sample": True, "temperature": 0.7}
YES = {"function": "map", "mapping_dict": {"yes": 1, "no": 0}, "default_value": 0}
LOWER, FIRST, VOTE = {"function": "lowercase"}, {"function": "take_first"}, {"function": "majority_vote"}
NUMBER = {"function": "regex", "regex_pattern": r"(\d+)"}


def first_k(k: int) -> dict:
    return {"function": "take_first_k", "k": k}


def rows(*pairs) -> list[dict]:
    return [{"q": f"Row {at}:", "t": target} for at, (target, _) in enumerate(pairs)]


YES_NO = [("1", ["yes"]), ("0", ["No"]), ("1", ["no"]), ("0", ["YES"]), ("1", ["Yes"]), ("1", ["perhaps"]), ("0", ["no"])]
COLOURS = [("red", ["red"]), ("blue", ["red"]), ("green", ["green"]), ("blue", ["blue"]), ("red", ["black"]), ("green", ["blue"])]
NUMBERS = [
    ("7", ["It is 7.", "8", "It is 7!", "9"]),
    ("8", ["7", "8", "so 8", "7"]),
    ("9", ["none", "no number", "9", "9"]),
    ("4", ["5", "4", "6", "4"]),
    ("3", ["3", "3", "3", "3"]),
]
FIGURE = [{"metric": "exact_match", "ignore_case": True}]
BOTH = [{"metric": "f1"}, {"metric": "mcc"}]

CASES = [
    (task("classes", filter_list=[{"name": "mapped", "filter": [LOWER, YES, FIRST]}], metric_list=BOTH), YES_NO),
    (task("labels", metric_list=[{"metric": "mcc"}, {"metric": "exact_match"}]), COLOURS),
    (
        task(
            "votes",
            generation_kwargs=SAMPLES,
            repeats=4,
            metric_list=FIGURE,
            filter_list=[
                {"name": "first", "filter": [NUMBER, FIRST]},
                {"name": "vote", "filter": [NUMBER, VOTE, FIRST]},
                {"name": "vote@3", "filter": [first_k(3), NUMBER, VOTE, FIRST]},
                {"name": "all", "filter": [NUMBER]},
            ],
        ),
        NUMBERS,
    ),
    (task("greedy", repeats=3, metric_list=FIGURE, filter_list=[{"name": "vote", "filter": [NUMBER, VOTE, FIRST]}]), NUMBERS),
    (task("plain", repeats=4, generation_kwargs=SAMPLES, metric_list=FIGURE), NUMBERS),
    (
        task("choices", output_type="multiple_choice", doc_to_choice=["a", "b", "c"], metric_list=[{"metric": "mcc"}, {"metric": "acc"}]),
        [("a", [-1, -2, -3]), ("b", [-1, -2, -3]), ("c", [-3, -2, -1]), ("b", [-5, -1, -1]), ("a", [-2, -3, -1]), ("c", [-9, -8, -1])],
    ),
]


def case(keys: dict, pairs: list, folder: Path) -> dict:
    documents = rows(*pairs)
    data = folder / f"{keys['task']}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in documents))
    keys = {**keys, "dataset_kwargs": {"data_files": {"test": str(data)}}}
    (folder / f"{keys['task']}.yaml").write_text(yaml.safe_dump(keys))
    repeats = keys.get("repeats", 1)
    answers = {}
    for row, (_, given) in zip(documents, pairs, strict=True):
        if keys["output_type"] == "multiple_choice":
            answers[row["q"]] = [(sum_, False) for sum_ in given]
        elif keys["generation_kwargs"]["do_sample"]:
            answers[row["q"]] = given[:repeats]
        else:
            answers[row["q"]] = given[:1] * repeats
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(
        Told(answers), tasks=[keys["task"]], task_manager=manager, bootstrap_iters=DRAWS, fewshot_random_seed=1234
    )["results"][keys["task"]]
    figures = {key: value for key, value in found.items() if "," in key}
    del keys["dataset_kwargs"]
    keys["dataset_kwargs"] = {"data_files": {"test": data.name}}
    return {"task": yaml.safe_dump(keys), "rows": documents, "answers": answers, "figures": figures}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        cases = {keys["task"]: case(keys, pairs, Path(name)) for keys, pairs in CASES}
    OUT.write_text(json.dumps({"lm_eval": "0.4.13", "draws": DRAWS, "cases": cases}, indent=1, ensure_ascii=False) + "\n")
    for name, found in cases.items():
        print(name, found["figures"])


if __name__ == "__main__":
    main()
