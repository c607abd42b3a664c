#!/usr/bin/env python3
"""What a stage costs that does nothing: a chain of commands, each reading the one before, run cold on a disk.

    python3 benches/chain.py [--stages 50] [--rounds 5] [--folder DIR] [--pipeline PATH] [--strace]

Prints wall and CPU time per stage (median and least over the rounds; CPU counts the stages' processes), and with `--strace` how often each call that waits
for the disk was made per stage. `--folder` should be on the disk that is meant: on tmpfs nothing waits.
"""

import argparse
import os
import pathlib
import re
import resource
import shutil
import statistics
import subprocess
import tempfile
import time

FLUSHES = ("fsync", "fdatasync", "syncfs", "sync_file_range")


def write(folder: pathlib.Path, stages: int) -> pathlib.Path:
    lines = ["version: 1", "name: chain", "stages:"]
    for at in range(stages):
        before = f"inputs: {{ before: s{at - 1:03} }}, " if at else ""
        lines += [f"  s{at:03}:", "    uses: command", f"    with: {{ run: 'echo {at} > $OUTPUT_out/file', {before}outputs: {{ out: files }} }}"]
    file = folder / "chain.yaml"
    file.write_text("\n".join(lines) + "\n")
    return file


def cold(program: str, file: pathlib.Path, wrapper: list[str]) -> tuple[float, float]:
    home = file.parent / "home"
    shutil.rmtree(home, ignore_errors=True)
    os.sync()
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([*wrapper, program, "--home", str(home), "run", "-q", str(file)], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - began, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--pipeline", default="pipeline")
    parser.add_argument("--strace", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        file = write(pathlib.Path(folder), options.stages)
        runs = [cold(options.pipeline, file, []) for _ in range(options.rounds)]
        for name, times in (("wall", [wall for wall, _ in runs]), ("CPU", [cpu for _, cpu in runs])):
            per_stage = [1000 * seconds / options.stages for seconds in times]
            print(f"{name:5} {statistics.median(per_stage):7.1f} ms a stage, least {min(per_stage):.1f} ms")
        if options.strace:
            trace = pathlib.Path(folder) / "trace"
            cold(options.pipeline, file, ["strace", "-f", "-qq", "-o", str(trace), "-e", "trace=" + ",".join(FLUSHES)])
            text = trace.read_text()
            for call in FLUSHES:
                # A call that another process interrupted is shown twice.
                count = len(re.findall(rf"\b{call}\(", text))
                print(f"{call:16} {count / options.stages:6.2f} a stage")


if __name__ == "__main__":
    main()
