"""Merges a LoRA adapter into a checkpoint of 2.5 GB: `pipeline run` beside PEFT's merge_and_unload and save_pretrained.

    cargo build --release && cargo build --release -p model --example random_checkpoint
    target/release/examples/random_checkpoint DIR        # DIR/base (Llama-3.2-1B's shape in bf16) and DIR/adapter (rank 16)
    python benches/merge.py DIR [--pipeline target/release/pipeline] [--work WORK] [--publish] [--skip-peft]

Prints JSON: what the machine reads, copies, and copies and flushes of the same file in the same run; seconds and processor seconds of
each side, gigabytes of weights a second, the phases of our stage (of a second run, as recording them takes time itself), and how the
merged tensors compare. Both sides read from the page cache. Ours checks its inputs, proves the merge, hashes and flushes what it wrote,
and with `--publish` publishes a copy; PEFT does none of it. PEFT adds in bf16 and ours in f32, rounded once, so that most tensors differ
in the last bit. The store lies in WORK (DIR where none is given): one in memory, such as /dev/shm, leaves the disk out.

Needs `pip install torch transformers peft` for the other side; `--skip-peft` measures ours alone.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

PIPELINE = """version: 1
name: merge
stages:
  base:
    uses: download
    with: {{ path: {folder}/base }}
  adapter:
    uses: download
    with: {{ path: {folder}/adapter, as: adapter }}
  merged:
    uses: merge
    with: {{ model: base, adapter: adapter }}
"""
PUBLISH = "publish: { merged: ./merged }\n"

PEFT = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
torch.set_num_threads({threads})
folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder + "/base", dtype=torch.bfloat16)
PeftModel.from_pretrained(model, folder + "/adapter").merge_and_unload().save_pretrained(folder + "/peft")
"""


def timed(command, **options):
    """Runs a command; seconds on the clock and of the processor, and what it printed."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **options)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(wall, 2), "cpu_seconds": round(cpu, 2)}, ran.stdout


def machine(file, work):
    """Gigabytes a second of reading a file that is in the page cache, of copying it, and of copying it to the disk."""
    gigabytes, copy = file.stat().st_size / 1e9, work / "copy"

    def speed(*command):
        figures, _ = timed(["dd", "bs=1M", "status=none", *command])
        return round(gigabytes / figures["seconds"], 2)

    speeds = {
        "read": speed(f"if={file}", "of=/dev/null"),
        "copy": speed(f"if={file}", f"of={copy}"),
        "copy_and_flush": speed(f"if={file}", f"of={copy}", "conv=fsync"),
    }
    copy.unlink()
    return speeds


def ours(program, folder, work, threads, publish):
    """The merge stage alone, its inputs being in the store already."""
    (work / "merge.yaml").write_text(PIPELINE.format(folder=folder) + (PUBLISH if publish else ""))
    run = [program, "--home", str(work / "home"), "run", "merge.yaml", "--threads", str(threads), "--format", "json"]
    timed([*run, "--until", "base", "--until", "adapter"], cwd=work)
    run += ["--only", "merged", "--force", "merged"]
    figures, printed = timed(run, cwd=work)
    profiled = json.loads(timed([*run, "--profile"], cwd=work)[1])
    printed = json.loads(printed)
    stage = next(stage for stage in printed["stages"] if stage["stage"] == "merged")
    profiles = (profiled.get("profiles") or {}).get("stages", [])
    phases = [row for profile in profiles for row in profile["profile"]["phases"]]
    figures["stage_seconds"] = round(stage["seconds"], 2)
    figures["phases"] = {"  " * row["depth"] + row["name"]: round(row["seconds"], 3) for row in phases}
    return figures


def difference(one, other):
    """How many tensors are equal to the bit, and the greatest difference of the others."""
    import torch
    from safetensors import safe_open

    def opened(folder):
        return [safe_open(path, "pt") for path in sorted(Path(folder).glob("*.safetensors"))]

    def tensors(files):
        return {name: file for file in files for name in file.keys()}

    ones, others = tensors(opened(one)), tensors(opened(other))
    names = sorted(ones.keys() & others.keys())
    equal, greatest = 0, 0.0
    for name in names:
        a, b = ones[name].get_tensor(name), others[name].get_tensor(name)
        if torch.equal(a, b):
            equal += 1
        else:
            greatest = max(greatest, (a.float() - b.float()).abs().max().item())
    return {"tensors": len(names), "equal": equal, "greatest_difference": greatest}


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--pipeline", default="target/release/pipeline")
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--work", type=Path)
    arguments.add_argument("--publish", action="store_true")
    arguments.add_argument("--skip-peft", action="store_true")
    arguments = arguments.parse_args()
    folder = arguments.folder.resolve()
    program = str(Path(arguments.pipeline).resolve())
    gigabytes = sum(path.stat().st_size for path in (folder / "base").glob("*.safetensors")) / 1e9
    result = {"gigabytes": round(gigabytes, 2), "threads": arguments.threads}
    work = (arguments.work or folder).resolve() / "pipeline"
    work.mkdir(parents=True, exist_ok=True)
    result["machine"] = machine(max((folder / "base").glob("*.safetensors"), key=lambda file: file.stat().st_size), work)
    result["ours"] = ours(program, folder, work, arguments.threads, arguments.publish or not arguments.skip_peft)
    if not arguments.skip_peft:
        import peft
        import torch
        import transformers

        result["peft"], _ = timed([sys.executable, "-c", PEFT.format(threads=arguments.threads), str(folder)])
        result["versions"] = {"peft": peft.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
        result["compared"] = difference(work / "merged", folder / "peft")
    for side in ("ours", "peft"):
        if side in result:
            result[side]["gigabytes_per_second"] = round(gigabytes / result[side]["seconds"], 3)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
