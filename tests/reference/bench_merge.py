#!/usr/bin/env python3
"""Measures a merge: our stage in the built program, and PEFT's merge_and_unload with save_pretrained. Time and peak memory.

    cargo build --release && cargo run --release -p model --example random_checkpoint -- FOLDER
    pip install torch transformers peft safetensors
    python tests/reference/bench_merge.py FOLDER [--skip-peft]

FOLDER has `base` and `adapter`, and needs free space of three times the base. Memory is sampled every 5 ms from /proc: `anonymous` is
what a process holds itself (RssAnon), `with files` also counts mapped pages of files, which the system takes back when it likes
(VmHWM). Our stage merges, proves the result, and hands it to the store; PEFT merges and saves.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "target/release/pipeline"
INPUTS = """version: 1
name: bench
stages:
  base: {{ uses: download, with: {{ path: {folder}/base }} }}
  adapter: {{ uses: download, with: {{ path: {folder}/adapter, as: adapter }} }}
"""
MERGE = """  merged: {{ uses: merge, with: {{ model: base, adapter: adapter }} }}
"""
PEFT = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapter, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", low_cpu_mem_usage=True)
PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)
"""


def status(pid):
    try:
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    kib = lambda name: int(fields[name].split()[0]) / 1024 if name in fields else 0.0
    return {"anonymous": kib("RssAnon"), "with files": kib("VmHWM")}


def stage_of(parent):
    """The process of the stage that the program runs, once it is there."""
    try:
        children = pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        threads = pathlib.Path(f"/proc/{parent}/task").iterdir()
        for thread in threads:
            children += (thread / "children").read_text().split()
    except OSError:
        return None
    for child in children:
        try:
            if b"__stage" in pathlib.Path(f"/proc/{child}/cmdline").read_bytes():
                return child
        except OSError:
            pass
    return None


def measure(command, of_stage):
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peak, pid = {}, None if of_stage else process.pid
    while process.poll() is None:
        pid = pid or stage_of(process.pid)
        found = status(pid) if pid else None
        for name, value in (found or {}).items():
            peak[name] = max(peak.get(name, 0.0), value)
        time.sleep(0.005)
    if process.returncode:
        sys.exit(process.stderr.read())
    return {"seconds": time.monotonic() - began} | {f"{name}, MiB": value for name, value in peak.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--skip-peft", action="store_true")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    file, home = folder / "bench.yaml", folder / "home"
    run = [PROGRAM, "run", file, "--home", home]
    shutil.rmtree(home, ignore_errors=True)
    file.write_text(INPUTS.format(folder=folder))
    subprocess.run(run, check=True, capture_output=True)
    file.write_text((INPUTS + MERGE).format(folder=folder))
    found = {"ours": measure(run, of_stage=True)}
    shutil.rmtree(home)
    if not arguments.skip_peft:
        out = folder / "peft"
        found["peft"] = measure([sys.executable, "-c", PEFT, folder / "base", folder / "adapter", out], of_stage=False)
        shutil.rmtree(out)
        found["ours / peft"] = {name: found["ours"][name] / found["peft"][name] for name in found["ours"]}
    print(json.dumps(found, indent=2))


main()
