#!/usr/bin/env python3
"""What a stage costs that does nothing: commands, each reading the one before, run cold on a disk and then once more with nothing to do.

    python3 benches/chain.py [--stages 50] [--shape chain] [--rounds 5] [--noops 5] [--folder DIR] [--pipeline PATH] [--strace]

A `chain` of up to 1000 stages is one; a longer one is cut into chains of 1000, each in a file of its own that is included. A `sweep` is half as many children
of one stage, and a stage that reads each. A `fan` is one stage that all others read.

Prints wall and CPU time per stage (median and least over the rounds; CPU counts the stages' processes), those of a run with nothing to do with its peak memory,
and with `--strace` how often each call that waits for the disk was made per stage. `--folder` should be on the disk that is meant: on tmpfs nothing waits.
"""

import argparse
import os
import pathlib
import re
import statistics
import subprocess
import tempfile
import time

FLUSHES = ("fsync", "fdatasync", "syncfs", "sync_file_range")


LONGEST = 1000


def stage(name: str, run: str, inputs: str = "", more: str = "") -> str:
    return f"  {name}: {{ uses: command,{more} with: {{ run: '{run} > $OUTPUT_out/file', {inputs}outputs: {{ out: files }} }} }}"


def chain(first: int, length: int) -> list[str]:
    reads = [""] + [f"inputs: {{ before: s{at - 1:05} }}, " for at in range(first + 1, first + length)]
    return [stage(f"s{first + at:05}", f"echo {first + at}", read) for at, read in enumerate(reads)]


def sweep(children: int) -> list[str]:
    made = stage("made", "echo $AT", more=f" matrix: {{ env.AT: {[str(at) for at in range(children)]} }},").replace("with: {", "with: { env: { AT: '' },")
    return [made, stage("read", "cat $INPUT_before/file", "inputs: { before: made }, ")]


def fan(stages: int) -> list[str]:
    reads = [stage(f"s{at:05}", f"echo {at}", "inputs: { before: first }, ") for at in range(1, stages)]
    return [stage("first", "echo 0"), *reads]


def write(folder: pathlib.Path, shape: str, stages: int) -> pathlib.Path:
    file = folder / "chain.yaml"
    begin = ["version: 1", "name: chain"]
    if shape == "chain" and stages > LONGEST:
        firsts = range(0, stages, LONGEST)
        for first in firsts:
            part = chain(first, min(LONGEST, stages - first))
            (folder / f"part{first}.yaml").write_text("\n".join(["version: 1", "stages:", *part]) + "\n")
        begin += ["include:", *(f"  p{first}: ./part{first}.yaml" for first in firsts)]
    else:
        lines = {"chain": lambda: chain(0, stages), "sweep": lambda: sweep(stages // 2), "fan": lambda: fan(stages)}[shape]()
        begin += ["stages:", *lines]
    file.write_text("\n".join(begin) + "\n")
    return file


def run(program: str, file: pathlib.Path, home: pathlib.Path, wrapper: tuple[str, ...] = ()) -> tuple[float, float, float]:
    """Wall and CPU seconds, of all processes that were waited for, and the peak memory of the run's own in MiB."""
    os.sync()
    began = time.monotonic()
    process = subprocess.Popen([*wrapper, program, "--home", str(home), "run", "-q", str(file)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{program} ended with {process.returncode}")
    return time.monotonic() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def told(name: str, times: list[float], unit: str) -> None:
    print(f"{name:12} {statistics.median(times):8.1f} {unit}, least {min(times):.1f} {unit}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=50)
    parser.add_argument("--shape", choices=["chain", "sweep", "fan"], default="chain")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--noops", type=int, default=5)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--pipeline", default="pipeline")
    parser.add_argument("--strace", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        file = write(pathlib.Path(folder), options.shape, options.stages)
        # A home of its own for each round: one that is removed first leaves ext4 to search for inodes that were not freed just now.
        homes = [file.parent / f"home{at}" for at in range(options.rounds)]
        runs = [run(options.pipeline, file, home) for home in homes]
        for name, times in (("wall", [wall for wall, _, _ in runs]), ("CPU", [cpu for _, cpu, _ in runs])):
            told(f"cold, {name}", [1000 * seconds / options.stages for seconds in times], "ms a stage")
        noops = [run(options.pipeline, file, homes[-1]) for _ in range(options.noops)]
        for name, times in (("wall", [wall for wall, _, _ in noops]), ("CPU", [cpu for _, cpu, _ in noops])):
            told(f"no-op, {name}", [1000 * seconds for seconds in times], "ms")
        print(f"peak memory  {max((memory for _, _, memory in noops), default=0):8.1f} MiB with nothing to do, {max(memory for _, _, memory in runs):.1f} MiB cold")
        if options.strace:
            trace = pathlib.Path(folder) / "trace"
            run(options.pipeline, file, file.parent / "traced", ("strace", "-f", "-qq", "-o", str(trace), "-e", "trace=" + ",".join(FLUSHES)))
            text = trace.read_text()
            for call in FLUSHES:
                # A call that another process interrupted is shown twice.
                count = len(re.findall(rf"\b{call}\(", text))
                print(f"{call:16} {count / options.stages:6.2f} a stage")


if __name__ == "__main__":
    main()
