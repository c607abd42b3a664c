#!/usr/bin/env python3
"""Has `pipeline validate` read task files of lm-evaluation-harness, and counts those that it takes and what it says of the others.

    python3 tests/reference/check_task_files.py LM_EVAL/tasks [--each 3] [--without-functions] [--program target/release/pipeline]

LM_EVAL is the package as it is installed (`pip download --no-deps lm_eval==0.4.13`, unpacked). Of each folder the first files by name are read, as many as
`--each` says.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests/golden/evaltasks/model"


def said(program: str, tasks: Path, file: Path, folder: Path, functions: bool) -> str:
    """What is wrong with a file, without names and numbers; nothing of one that is taken."""
    # A task may name what lies anywhere in its part of the tree.
    data = tasks / file.relative_to(tasks).parts[0]
    scores = {"model": "model", "tasks": [str(file)], "task_data": str(data if data.is_dir() else tasks), "task_functions": functions}
    stages = {"model": {"uses": "download", "with": {"path": str(MODEL)}}, "scores": {"uses": "evaluate", "with": scores}}
    job = folder / f"{os.urandom(8).hex()}.yaml"
    job.write_text(json.dumps({"version": 1, "name": "tasks", "stages": stages}))
    ran = subprocess.run([program, "validate", str(job), "--format", "json"], capture_output=True, text=True)
    if ran.returncode == 0:
        return ""
    problems = json.loads(ran.stdout)[0]["problems"]
    message = next(problem["message"] for problem in problems if problem["severity"] == "error")
    return re.sub(r"^.*?:\d+(, )?", "", message)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--each", type=int, default=3)
    parser.add_argument("--without-functions", action="store_true")
    parser.add_argument("--program", default=str(ROOT / "target/release/pipeline"))
    arguments = parser.parse_args()
    tasks = arguments.tasks.resolve()
    by_folder = collections.defaultdict(list)
    for file in sorted(tasks.rglob("*.yaml")):
        if re.search(r"^(task|group):", file.read_text(errors="replace"), re.MULTILINE):
            by_folder[file.parent].append(file)
    files = [file for folder in by_folder.values() for file in folder[: arguments.each]]
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda file: said(arguments.program, tasks, file, Path(folder), not arguments.without_functions), files))
    print(f"{answers.count('')} of {len(files)} files are taken, of {sum(map(len, by_folder.values()))} there are")
    for answer, count in collections.Counter(filter(None, answers)).most_common():
        print(f"{count:6} {answer}")


if __name__ == "__main__":
    main()
