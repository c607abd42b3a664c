#!/usr/bin/env python3
"""How memory and time of a training step grow with the length of the rows and with the layers, with and without recomputation.

    python3 benches/growth.py [--dtype bf16] [--threads 2] [--longest 8192]

Runs `cargo bench -p model --bench lora_step` (SmolLM-135M's shape, LoRA on q and v) once for each configuration, one document per
row, and prints Markdown tables. The peak is that of anonymous memory, sampled.
"""

import argparse

import measure

LENGTHS = [512, 1024, 2048, 4096, 8192]
LAYERS = [10, 20, 30, 60]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--longest", type=int, default=LENGTHS[-1])
    arguments = parser.parse_args()
    program = measure.cargo_bench("model", "lora_step")

    def table(name, values, argument):
        print(f"| {name} | peak MiB | tokens/s | CPU-s a step | recomputed: peak MiB | tokens/s | CPU-s a step |")
        print("|---|---|---|---|---|---|---|", flush=True)
        for value in values:
            cells = [str(value)]
            for recompute in ("none", "layers"):
                command = [program, "--bench", argument, value, "--recompute", recompute, "--dtype", arguments.dtype]
                command += ["--threads", arguments.threads, "--steps", 2, "--warmup", 1]
                measured = measure.run(command)
                step = measured.json()
                cells += [f"{measured.peak_anon_mib:.0f}", f"{step['tokens_per_s']:.0f}", f"{step['cpu_seconds_per_step']:.2f}"]
            print("| " + " | ".join(cells) + " |", flush=True)
        print()

    table("tokens in a row", [length for length in LENGTHS if length <= arguments.longest], "--seq")
    table("layers", LAYERS, "--layers")


if __name__ == "__main__":
    main()
