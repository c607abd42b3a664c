#!/usr/bin/env python3
"""Training and decoding in bf16 and in f32 in turn: bf16 is not the slower one, whatever the CPU.

    python3 benches/dtypes.py [--rounds 5] [--threads 2] [--layers 4]

Prints a Markdown table: the least CPU-seconds of each dtype over the rounds, in each of which every program runs once, and the ratio
of f32's to bf16's. Exits with 1 where a ratio is under 0.95. The kernels are those that are chosen on this machine by measurement.
Needs nothing from the network, and no other program.
"""

import argparse

import measure

# name: bench, arguments, CPU-seconds of a unit of work from its output
CASES = {
    "LoRA step": ("lora_step", ["--steps", 4], lambda output: output["cpu_seconds_per_step"]),
    "prefill": ("decode", ["--prompt", 512, "--new", 1], lambda output: 1 / output["prefill_tokens_per_cpu_s"]),
    "decoding": ("decode", ["--prompt", 16, "--new", 64], lambda output: 1 / output["decode_tokens_per_cpu_s"]),
    "decoding, batch 8": ("decode", ["--prompt", 16, "--new", 32, "--batch", 8], lambda output: 1 / output["decode_tokens_per_cpu_s"]),
}
LEAST = 0.95
"""A ratio below this is no noise."""


def command(case, dtype, arguments):
    bench, extra, _ = CASES[case]
    name = "--dtype" if bench == "lora_step" else "--weights"
    common = [name, dtype, "--threads", arguments.threads, "--layers", arguments.layers]
    repetitions = [] if bench == "lora_step" else ["--repetitions", 2]
    return [measure.cargo_bench("model", bench), "--bench", *extra, *common, *repetitions]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    commands = {(case, dtype): command(case, dtype, arguments) for case in CASES for dtype in ("f32", "bf16")}
    found = {key: [] for key in commands}
    kernels = {}
    for _ in range(arguments.rounds):
        for (case, dtype), words in commands.items():
            output = measure.run(words).json()
            kernels[dtype] = output["kernel_set"]
            found[case, dtype].append(CASES[case][2](output))
    print(f"f32: {kernels['f32']}; bf16: {kernels['bf16']}\n")
    print("| case | CPU-ms in f32 | CPU-ms in bf16 | f32's to bf16's |")
    print("|---|---|---|---|")
    slower = []
    for case in CASES:
        f32, bf16 = (min(found[case, dtype]) for dtype in ("f32", "bf16"))
        print(f"| {case} | {1000 * f32:.2f} | {1000 * bf16:.2f} | {f32 / bf16:.2f} |")
        if f32 / bf16 < LEAST:
            slower.append(case)
    if slower:
        raise SystemExit(f"bf16 is slower than f32: {', '.join(slower)}")


if __name__ == "__main__":
    main()
