#!/usr/bin/env python3
"""Greedy decoding with the `cpu` kernels, with transformers and with llama.cpp in turn: same shape, threads and machine.

    python3 -m venv rivals && rivals/bin/pip install torch transformers llama-cpp-python gguf
    RIVAL_PYTHON=rivals/bin/python python3 benches/decode.py [--weights bf16] [--batch 1] [--rounds 3] [--threads 2]
    RIVAL_PYTHON=rivals/bin/python python3 benches/decode.py --weights q4_k --weights q6_k --hidden 1024 --intermediate 2816 \
        --layers 12 --heads 16 --kv-heads 4 --vocab 32768

Prints a Markdown table: medians over the rounds, their spread, and ours to its, by the clock and by processor time. In each round
every program runs once, one after the other. A rival that is not installed is named and left out. Nothing is needed from the
network. llama.cpp has no other batch than of sequences that are decoded together, as here; transformers has no quantised weights.
`q4_k`, `q5_k` and `q6_k` are the blocks of GGUF files, which want a hidden and an intermediate size in multiples of 256.
"""

import argparse
import sys
from pathlib import Path

import measure

RIVALS = Path(__file__).parent / "rivals"
WEIGHTS = ["f32", "bf16", "int8", "int4"]
K_BLOCKS = ["q4_k", "q5_k", "q6_k"]
SHAPE = ["hidden", "layers", "heads", "kv-heads", "intermediate", "vocab"]


def programs(weights, ours, arguments):
    """Name and command of each program that has such weights."""
    yield "pipeline", [ours, "--bench"]
    if weights in ("f32", "bf16") and arguments.beside != "llama.cpp":
        python = measure.python_with("torch", "transformers")
        for loop in ("rawloop", "generate") if python else ():
            yield f"transformers, {loop}", [python, RIVALS / "torch_decode.py", "--loop", loop]
    python = measure.python_with("llama_cpp", "gguf")
    if python and arguments.beside != "transformers":
        yield "llama.cpp", [python, RIVALS / "llama_cpp_decode.py", "--extra-buffers", arguments.llama_cpp_extra_buffers]


def say_what_is_missing():
    for what, modules in {"transformers": ("torch", "transformers"), "llama.cpp": ("llama_cpp", "gguf")}.items():
        if measure.python_with(*modules) is None:
            print(f"{what} is not installed: RIVAL_PYTHON names a Python that has {', '.join(modules)}", file=sys.stderr)


def compare(weights, batch, ours, arguments):
    """One type of weights at one batch."""
    common = ["--weights", weights, "--batch", batch, "--threads", arguments.threads, "--new", arguments.new]
    common += ["--prompt", arguments.prompt, "--repetitions", arguments.repetitions]
    for name in SHAPE:
        size = getattr(arguments, name.replace("-", "_"))
        common += [] if size is None else [f"--{name}", size]
    results = {name: [] for name, _ in programs(weights, ours, arguments)}
    for _ in range(arguments.rounds):
        for name, command in programs(weights, ours, arguments):
            results[name].append(measure.run([*command, *common]).json())
    reference = summary(results["pipeline"])
    for name, rounds in results.items():
        speed, spread, cpu, prefill = summary(rounds)
        ratios = "| | | |"
        if name != "pipeline":
            ratios = f"| {reference[0] / speed:.2f} | {reference[2] / cpu:.2f} | {reference[3] / prefill:.2f} |"
        share = rounds[-1].get("share_of_bandwidth")
        share = "" if share is None else f"{100 * share:.0f} %"
        print(
            f"| {weights}, batch {batch} | {name} | {speed:.0f} | ±{100 * spread:.0f} % | {cpu:.0f} | {prefill:.0f} | {share} {ratios}",
            flush=True,
        )


def summary(rounds):
    """New tokens a second and their spread, new tokens a CPU-second, and prompt tokens a second."""
    speeds = [output["decode_tokens_per_s"][1] for output in rounds]
    cpu = measure.median([output["decode_tokens_per_cpu_s"] for output in rounds])
    prefill = measure.median([output["prefill_tokens_per_s"][1] for output in rounds])
    return measure.median(speeds), measure.spread(speeds), cpu, prefill


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", choices=WEIGHTS + K_BLOCKS, action="append", help=f"a type, may be repeated; default: {', '.join(WEIGHTS)}")
    parser.add_argument("--batch", type=int, action="append", help="answers that grow together, may be repeated; default: 1 and 8")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--beside", choices=["transformers", "llama.cpp"], help="one program alone; default: both")
    parser.add_argument("--llama-cpp-extra-buffers", choices=["yes", "no"], default="yes", help="whether llama.cpp packs weights anew for the machine")
    for name in SHAPE:
        parser.add_argument(f"--{name}", type=int, help="of the model; default: SmolLM-135M's")
    arguments = parser.parse_args()
    say_what_is_missing()
    ours = measure.cargo_bench("model", "decode")
    print("| weights | program | tokens/s | spread | tokens/CPU-s | prefill tokens/s | of the bandwidth | tokens/s, ours to its | tokens/CPU-s, ours to its | prefill, ours to its |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for weights in arguments.weights or WEIGHTS:
        for batch in arguments.batch or [1, 8]:
            compare(weights, batch, ours, arguments)


if __name__ == "__main__":
    main()
