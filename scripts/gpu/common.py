"""What the scripts share: a project in a temporary folder, the program, checks that are written down as they come."""

import argparse
import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Left(Exception):
    """Why a check is left out."""


class Report:
    """Checks by name, in a JSON file that is whole after each."""

    def __init__(self, path):
        self.path, self.checks = Path(path), {}

    def check(self, name, run):
        """Runs a check, which returns what it found, and fails by an exception."""
        began = time.monotonic()
        try:
            found = {"result": "ok", **(run() or {})}
        except Left as why:
            found = {"result": "left out", "why": str(why)}
        except Exception as error:
            traceback.print_exc()
            found = {"result": "FAILED", "why": str(error)[-2000:]}
        self.checks[name] = {**found, "seconds": round(time.monotonic() - began, 1)}
        print(f"{name}: {json.dumps(self.checks[name])}", flush=True)
        self.path.write_text(json.dumps(self.checks, indent=1))

    def code(self):
        """The exit code."""
        return int(any(check["result"] == "FAILED" for check in self.checks.values()))


class Project:
    """A folder with a pipeline of the tests, and homes of its own."""

    def __init__(self, program, device):
        self.program, self.device = str(Path(program).resolve()), device
        self.folder = Path(tempfile.mkdtemp(prefix="pipeline-gpu-"))
        for file in (ROOT / "tests/pipelines").glob("*.*"):
            shutil.copy(file, self.folder)
        self.environment = {
            **os.environ,
            "PIPELINE_PYTHON": os.environ.get("PIPELINE_PYTHON", sys.executable),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "workers/torch/src"), os.environ.get("PYTHONPATH")])),
            "XDG_RUNTIME_DIR": str(self.folder),
        }

    def with_program(self, program):
        """The same project for another program."""
        other = copy.copy(self)
        other.program = str(Path(program).resolve())
        return other

    def start(self, *arguments):
        """Starts the program."""
        command = [self.program, *map(str, arguments)]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, *arguments, code=0):
        """Runs the program to its end, with any code where none is given; what it printed."""
        process = self.start(*arguments)
        out, errors = process.communicate()
        if code is not None and process.returncode != code:
            raise RuntimeError(f"{' '.join(map(str, arguments))} ended with {process.returncode}:\n{out}{errors}")
        return out + errors

    def json(self, *arguments, code=0):
        """The JSON that a command prints; it may end with any code where none is given."""
        process = self.start(*arguments, "--format", "json")
        out, errors = process.communicate()
        if code is not None and process.returncode != code:
            raise RuntimeError(f"{' '.join(map(str, arguments))} ended with {process.returncode}:\n{out}{errors}")
        return json.loads(out)

    def exported(self, output, pipeline, *overrides):
        """A folder with what an output is."""
        folder = self.folder / "exported"
        shutil.rmtree(folder, ignore_errors=True)
        self.run("export", pipeline, output, "exported", *overrides)
        return folder

    def records(self, stage, pipeline, *overrides):
        """The records of a training."""
        text = (self.exported(f"{stage}.metrics", pipeline, *overrides) / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def on_device(self, *stages, dtype=None):
        """The overrides that have stages computed by the torch worker on the device."""
        for stage in stages:
            yield f"{stage}.backend=torch"
            yield f"{stage}.resources.device={self.device}"
            if dtype:
                yield f"{stage}.dtype={dtype}"


def losses(records):
    """Those of the steps."""
    return [record["loss"] for record in records if record["kind"] == "train" and record["loss"] is not None]


def apart(ours, theirs):
    """The greatest relative difference."""
    assert len(ours) == len(theirs) > 0, f"{len(ours)} and {len(theirs)} figures"
    return max(abs(one - two) / abs(two) for one, two in zip(ours, theirs, strict=True))


def arguments(description, **more):
    """What every script takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--pipeline", default=str(ROOT / "target/release/pipeline"), help="the program")
    parser.add_argument("--out", required=True, help="the JSON file")
    parser.add_argument("--device", default="cuda", choices=["cuda", "rocm", "npu", "cpu"])
    parser.add_argument("--only", default="", help="checks with this in their names")
    for name, default in more.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()
