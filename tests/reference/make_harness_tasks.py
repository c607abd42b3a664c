#!/usr/bin/env python3
"""Copies tasks of lm-evaluation-harness with the Python that they name, and gives them rows of made-up words in the columns that they read.

    python3 tests/reference/make_harness_tasks.py LM_EVAL/tasks OUT
    python3 tests/reference/check_harness.py --tasks OUT/tasks

LM_EVAL is the package as it is installed. What the functions import has to be installed, too: langdetect, nltk and immutabledict for `ifeval`, sympy, math_verify and
antlr4-python3-runtime==4.11 for `minerva_math_algebra`.
"""

import argparse
import json
import random
from pathlib import Path

WORDS = "the a cat dog on mat sat ran yes no not x 1 2 3 and or of".split()
# Instructions of IFEval, and what each is about.
INSTRUCTIONS = {
    "punctuation:no_comma": {},
    "change_case:english_lowercase": {},
    "length_constraints:number_words": {"num_words": 5, "relation": "at least"},
    "keywords:existence": {"keywords": ["cat"]},
    "startend:quotation": {},
}
ARGUMENTS = {"num_words": None, "relation": None, "keywords": None}


def words(count: int) -> str:
    return " ".join(random.choice(WORDS) for _ in range(count))


def mmlu_pro(row: int) -> dict:
    explained = f"A: Let's think step by step. {words(8)}. The answer is (A)."
    options = [words(2) for _ in range(random.choice([4, 10]))]
    category = random.choice(["math", "math", "law"])
    return {"question_id": row, "question": words(6) + "?", "options": options, "answer": random.choice("ABCD"), "cot_content": explained, "category": category}


def gpqa(row: int) -> dict:
    wrong = {f"Incorrect Answer {at}": words(at) + " [x]" for at in (1, 2, 3)}
    return {"Question": words(7) + "?", "Correct Answer": words(2) + " [title] " + words(1), **wrong}


def aqua(row: int) -> dict:
    return {"query": words(7) + "?", "choices": [f"({letter}) {words(2)}" for letter in "ABCDE"], "gold": [random.randrange(5)]}


def ifeval(row: int) -> dict:
    chosen = random.sample(sorted(INSTRUCTIONS), random.choice([1, 2]))
    return {"key": row, "prompt": words(8), "instruction_id_list": chosen, "kwargs": [ARGUMENTS | INSTRUCTIONS[name] for name in chosen]}


def math(row: int) -> dict:
    return {"problem": words(8), "level": "Level 1", "type": "Algebra", "solution": f"{words(5)} $\\boxed{{{row}}}$"}


def afrimmlu(row: int) -> dict:
    return {"subject": "math", "question": words(5) + "?", "choices": str([words(2) for _ in range(4)]), "answer": random.choice("ABCD")}


# The name, the file, what it includes, its rows, and the splits that it reads.
TASKS = [
    ("mmlu_pro_math", "mmlu_pro/mmlu_pro_math.yaml", "_default_template_yaml", mmlu_pro, ["test", "validation"]),
    ("gpqa_diamond", "gpqa/zeroshot/gpqa_diamond_zeroshot.yaml", "_gpqa_zeroshot_yaml", gpqa, ["train"]),
    ("aqua_rat", "agieval/aqua-rat.yaml", None, aqua, ["test"]),
    ("ifeval", "ifeval/ifeval.yaml", None, ifeval, ["train"]),
    ("minerva_math_algebra", "minerva_math/minerva_math_algebra.yaml", None, math, ["train", "test"]),
    ("afrimmlu", "afrimmlu/direct/prompt_1/afrimmlu_direct_eng.yaml", "afrimmlu_direct", afrimmlu, ["validation", "test"]),
]


def rewritten(text: str, module: str, included: str | None) -> str:
    """A task file whose functions are of another module, whose data are elsewhere, and which ends soon."""
    kept, in_tag = [], False
    for line in text.splitlines():
        in_tag = line.startswith("tag:") or (in_tag and line.lstrip().startswith("-"))
        if not in_tag and not line.startswith(("dataset_path:", "dataset_name:", "include:", "task:")):
            kept.append(line.replace("!function utils.", f"!function {module}.").replace("2048", "32").replace("1280", "32"))
    head = [] if included is None else [f"include: {included}"]
    return "\n".join([*head, *kept]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("harness", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    tasks = arguments.out / "tasks"
    tasks.mkdir(parents=True)
    for name, file, included, row, splits in TASKS:
        source = arguments.harness / file
        module = f"of_{name}"
        (tasks / f"{module}.py").write_text((source.parent / "utils.py").read_text())
        template = None
        if included is not None:
            template = f"_{name}"
            (tasks / template).write_text(rewritten((source.parent / included).read_text(), module, None))
        files = {split: f"{name}_{split}.jsonl" for split in splits}
        for split, rows in files.items():
            random.seed(f"{name} {split}")
            (arguments.out / rows).write_text("".join(json.dumps(row(at)) + "\n" for at in range(10)))
        text = rewritten(source.read_text(), module, template)
        if "temperature: 0" in text and "max_gen_toks" not in text:
            text = text.replace("  temperature: 0\n", "  temperature: 0\n  max_gen_toks: 32\n")
        data = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{ data_files: {json.dumps(files)} }}\n"
        (tasks / f"{name}.yaml").write_text(text + data)


if __name__ == "__main__":
    main()
