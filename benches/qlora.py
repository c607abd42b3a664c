#!/usr/bin/env python3
"""Training steps of an adapter on a base in bf16 and on one in NF4, ours and those of PyTorch, PEFT and bitsandbytes in turn.

    python3 -m venv rivals && rivals/bin/pip install torch transformers peft bitsandbytes
    RIVAL_PYTHON=rivals/bin/python python3 benches/qlora.py [--shape 1b] [--seq 512] [--rounds 3] [--steps 3] [--threads 2]

The shapes are those of Llama 3.2 1B and Llama 3.1 8B, with random weights; every linear layer but the head has an adapter of rank 8,
and layers are computed again in the backward. Prints a Markdown table: medians over the rounds, tokens a second beside ours in
bf16 and, of the rivals, beside ours of the same weights, and the most anonymous memory that the process had from its first step on.
Ours reads its weights from a checkpoint, which takes 2.5 or 16 GB of the folder for temporary files meanwhile. `--ours nf4` runs
ours with such weights alone: of the 8B shape the others need more memory than machines of 24 GB have.
"""

import argparse
import sys
from pathlib import Path

import measure

SHAPES = {
    "1b": ["--hidden", 2048, "--layers", 16, "--heads", 32, "--kv-heads", 8, "--intermediate", 8192, "--vocab", 128256],
    "8b": ["--hidden", 4096, "--layers", 32, "--heads", 32, "--kv-heads", 8, "--intermediate", 14336, "--vocab", 128256],
}
RIVAL = Path(__file__).parent / "rivals/torch_lora_step.py"


def programs(arguments, ours, python):
    """Name, weights and command of each."""
    common = [*SHAPES[arguments.shape], "--seq", arguments.seq, "--targets", "all-linear", "--dtype", "bf16"]
    common += ["--recompute", "layers", "--threads", arguments.threads, "--steps", arguments.steps, "--warmup", 1]
    for weights in [arguments.ours] if arguments.ours else ["bf16", "nf4"]:
        quantize = [] if weights == "bf16" else ["--quantize", weights]
        yield "pipeline", weights, [ours, "--bench", *common, "--stored", "bf16", *quantize]
        if not arguments.ours:
            yield "PEFT" if weights == "bf16" else "PEFT, bitsandbytes", weights, [python, RIVAL, *common, *quantize]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ours", choices=["bf16", "nf4"], help="ours alone, with such weights")
    arguments = parser.parse_args()
    python = measure.python_with("torch", "transformers", "peft", "bitsandbytes")
    if python is None and not arguments.ours:
        sys.exit("no torch, transformers, peft and bitsandbytes: RIVAL_PYTHON names a Python that has them")
    ours = measure.cargo_bench("model", "lora_step")
    results = {}
    for _ in range(arguments.rounds):
        for name, weights, command in programs(arguments, ours, python):
            results.setdefault((name, weights), []).append(measure.run(command).json())
    print("| program | weights | tokens/s | spread | CPU-s a step | peak MiB | tokens/s beside ours in bf16 | memory beside it | tokens/s, ours to its | CPU-s, its to ours | memory, ours to its |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    summaries = {key: summary(rounds) for key, rounds in results.items()}
    base = summaries.get(("pipeline", "bf16"))
    for (name, weights), (speed, spread, cpu, peak) in summaries.items():
        beside = f"{speed / base[0]:.2f} | {peak / base[3]:.2f}" if base else " | "
        ratios = " | | "
        if name != "pipeline":
            its = summaries["pipeline", weights]
            ratios = f" {its[0] / speed:.2f} | {cpu / its[2]:.2f} | {its[3] / peak:.2f} "
        print(f"| {name} | {weights} | {speed:.1f} | ±{100 * spread:.0f} % | {cpu:.1f} | {peak:.0f} | {beside} |{ratios}|")


def summary(rounds):
    """Tokens a second and their spread, CPU-seconds a step, and the peak of memory in MiB."""
    speeds = [output["tokens_per_s"] for output in rounds]
    cpu = measure.median([output["cpu_seconds_per_step"] for output in rounds])
    return measure.median(speeds), measure.spread(speeds), cpu, max(output["peak_anonymous_mib"] for output in rounds)


if __name__ == "__main__":
    main()
