"""What the side-by-side benches share: running a program while its memory is sampled, medians, and the program under test."""

import json
import os
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Measured:
    """One run of a program."""

    output: str
    wall: float
    """Seconds."""
    cpu: float
    """Processor seconds of it and its children, user and system."""
    peak_anon_mib: float
    """The most anonymous memory that it and its children held at once, sampled; pages of files are not in it."""

    def json(self):
        """The last line of the output, as JSON."""
        return json.loads(self.output.strip().splitlines()[-1])


def run(command, env=None, cwd=None, interval=0.02):
    """Runs a program to its end; an exit status other than 0 ends the bench with what the program said."""
    environment = {**os.environ, **(env or {})}
    began, before = time.perf_counter(), os.times()
    with subprocess.Popen(
        [str(word) for word in command], env=environment, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        peak = [0.0]
        sampler = threading.Thread(target=_sample, args=(process, peak, interval))
        sampler.start()
        output, errors = process.communicate()
        sampler.join()
    wall, after = time.perf_counter() - began, os.times()
    if process.returncode != 0:
        raise SystemExit(f"{command[0]} ended with {process.returncode}:\n{errors.decode(errors='replace')[-3000:]}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Measured(output.decode(), wall, cpu, peak[0])


def _sample(process, peak, interval):
    while process.poll() is None:
        peak[0] = max(peak[0], sum(_anon_mib(pid) for pid in _family(process.pid)))
        time.sleep(interval)


def _family(pid):
    """The process and all its descendants."""
    found, waiting = [], [pid]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                waiting += [int(child) for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
        except OSError:
            pass
    return found


def _anon_mib(pid):
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0


def median(values):
    """The median."""
    return statistics.median(values)


def spread(values):
    """Half of the distance from the least to the most, relative to the median."""
    return (max(values) - min(values)) / 2 / statistics.median(values)


def cargo_bench(package, name):
    """Builds a bench of the workspace and returns its program, so that cargo is not in what is measured."""
    command = ["cargo", "bench", "-p", package, "--bench", name, "--no-run", "--message-format=json"]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    for line in built.stdout.splitlines():
        message = json.loads(line)
        if message.get("executable") and message["target"]["name"] == name:
            return message["executable"]
    raise SystemExit(f"cargo built no bench named {name}")


def pipeline():
    """The program under test: `target/release/pipeline`, or what PIPELINE names."""
    program = Path(os.environ.get("PIPELINE", ROOT / "target/release/pipeline"))
    if not program.exists():
        raise SystemExit(f"{program} does not exist: cargo build --release")
    return program


def python_with(*modules):
    """A Python that has these modules: this one, or what RIVAL_PYTHON names; None where there is none."""
    import sys

    python = os.environ.get("RIVAL_PYTHON", sys.executable)
    probe = "import " + ", ".join(modules)
    found = subprocess.run([python, "-c", probe], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return python if found.returncode == 0 else None
