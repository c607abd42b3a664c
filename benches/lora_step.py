#!/usr/bin/env python3
"""Training steps of the `cpu` kernels and of PyTorch in turn: the same shapes, random weights, threads and machine.

    python3 -m venv rivals && rivals/bin/pip install torch transformers peft
    RIVAL_PYTHON=rivals/bin/python python3 benches/lora_step.py [--only qv] [--rounds 3] [--steps 5] [--threads 2]

Prints a Markdown table: medians over the rounds, their spread, and the ratio of tokens per second, of processor seconds and of
the peak of anonymous memory. In each round every program runs once, one after the other. Nothing is needed from the network.
PyTorch runs as it is and, in the case `qv`, also with what makes it faster here: an allocator that keeps its memory (glibc
tunables), torch.compile, and both.
"""

import argparse
import sys
from pathlib import Path

import measure

TUNABLES = {
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592:glibc.malloc.hugetlb=1"
}
WIDE = ["--hidden", 2048, "--layers", 4, "--heads", 32, "--kv-heads", 8, "--intermediate", 8192]
SMALL = ["--hidden", 384, "--layers", 12, "--heads", 6, "--kv-heads", 2, "--intermediate", 1024, "--vocab", 32768]

# name: arguments of both programs, number types
CASES = {
    "qv": ([], ["f32", "bf16"]),
    "all-linear": (["--targets", "all-linear"], ["f32", "bf16"]),
    "wide": (WIDE, ["f32", "bf16"]),
    "full": (SMALL + ["--trained", "weights"], ["f32", "bf16"]),
    "seq2048": (["--seq", 2048], ["f32", "bf16"]),
    "recompute": (["--recompute", "layers"], ["f32", "bf16"]),
}
RIVAL = Path(__file__).parent / "rivals/torch_lora_step.py"


def rivals(case, dtype):
    """Name, extra arguments and environment of each form of PyTorch."""
    forms = [("torch", [], {})]
    if case == "qv" and dtype == "bf16":
        forms += [
            ("torch, tunables", [], TUNABLES),
            ("torch.compile", ["--compile"], {}),
            ("torch.compile, tunables", ["--compile"], TUNABLES),
        ]
    return forms


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, action="append", help="a case, may be repeated; default: all")
    parser.add_argument("--dtype", choices=["f32", "bf16"], help="one number type; default: both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--stored", choices=["f32", "bf16"], help="ours reads its weights from a checkpoint of this type")
    parser.add_argument("--optimizer", choices=["adamw", "adamw_8bit", "adamw_8bit_all", "adamw_bf16"], help="of ours; PyTorch has its AdamW; default: adamw")
    parser.add_argument("--matmul-precision", choices=["highest", "high"], help="of ours in f32; default: highest")
    arguments = parser.parse_args()
    python = measure.python_with("torch", "transformers", "peft")
    if python is None:
        print("no torch, transformers and peft: RIVAL_PYTHON names a Python that has them", file=sys.stderr)
    ours = measure.cargo_bench("model", "lora_step")
    print("| case | program | tokens/s | spread | CPU-s a step | peak MiB | tokens/s, ours to its | CPU-s, its to ours | memory, ours to its |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for case in arguments.only or CASES:
        extra, dtypes = CASES[case]
        for dtype in dtypes:
            if arguments.dtype in (None, dtype):
                compare(case, dtype, extra, ours, python, arguments)


def compare(case, dtype, extra, ours, python, arguments):
    """One case in one number type."""
    common = [*extra, "--dtype", dtype, "--threads", arguments.threads, "--steps", arguments.steps]
    own = ["--stored", arguments.stored] if arguments.stored else []
    own += ["--optimizer", arguments.optimizer] if arguments.optimizer else []
    own += ["--matmul-precision", arguments.matmul_precision] if arguments.matmul_precision else []
    programs = {"pipeline": ([ours, "--bench", *common, *own], {})}
    if python is not None:
        for name, more, environment in rivals(case, dtype):
            programs[name] = ([python, RIVAL, *common, *more], environment)
    results = {name: [] for name in programs}
    for _ in range(arguments.rounds):
        for name, (command, environment) in programs.items():
            measured = measure.run(command, environment)
            results[name].append((measured.json(), measured.peak_anon_mib))
    reference = summary(results["pipeline"])
    for name, rounds in results.items():
        speed, spread, cpu, peak = summary(rounds)
        ratios = "| | | |"
        if name != "pipeline":
            ratios = f"| {reference[0] / speed:.2f} | {cpu / reference[2]:.2f} | {reference[3] / peak:.2f} |"
        print(f"| {case}, {dtype} | {name} | {speed:.0f} | ±{100 * spread:.0f} % | {cpu:.2f} | {peak:.0f} {ratios}", flush=True)


def summary(rounds):
    """Tokens per second and their spread, CPU-seconds a step, and the peak of memory in MiB."""
    speeds = [output["tokens_per_s"] for output, _ in rounds]
    cpu = measure.median([output["cpu_seconds_per_step"] for output, _ in rounds])
    return measure.median(speeds), measure.spread(speeds), cpu, max(peak for _, peak in rounds)


if __name__ == "__main__":
    main()
