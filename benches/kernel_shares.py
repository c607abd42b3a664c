#!/usr/bin/env python3
"""Where the time of a LoRA step goes: each kernel's share of it.

    python3 benches/kernel_shares.py [--dtype bf16] [--rounds 5] [--steps 4] [--threads 1] [--layers 4] [--targets q_proj,v_proj]

Prints a Markdown table, the longest first: of each kernel the least time of a step over the rounds, its share of their sum, its calls
a step, and its share of what the machine can do at most, by arithmetic or by memory, measured in the same round. A last row has what is
outside of kernels. The shape is SmolLM-135M's with few layers, so that the head's share is larger than in the model. Several threads
are counted as one: the time is that of the thread that waits for all.
"""

import argparse

import measure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="bf16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--targets", default="q_proj,v_proj")
    arguments = parser.parse_args()
    words = [measure.cargo_bench("model", "lora_step"), "--bench", "--profile", "yes", "--warmup", 0]
    for name in ("dtype", "steps", "threads", "layers", "targets"):
        words += [f"--{name}", getattr(arguments, name)]
    outputs = [measure.run(words).json() for _ in range(arguments.rounds)]
    rounds = [{kernel["name"]: kernel for kernel in steps_of(output)} for output in outputs]
    least = {name: min(kernels[name]["seconds"] for kernels in rounds) / arguments.steps for name in rounds[0]}
    outside = min(output["seconds_per_step"] - sum_of(output) / arguments.steps for output in outputs)
    least["(outside of kernels)"] = max(outside, 0.0)
    total = sum(least.values())
    print(f"{outputs[0]['kernel_set']}, {arguments.layers} layers, {1000 * total:.1f} ms a step\n")
    print("| kernel | calls a step | ms a step | share | of the machine's limit |")
    print("|---|---|---|---|---|")
    for name, seconds in sorted(least.items(), key=lambda item: -item[1]):
        calls, limit = "", ""
        if name in rounds[0]:
            calls = f"{rounds[0][name]['calls'] / arguments.steps:.0f}"
            shares = [kernels[name].get("share_of_limit") for kernels in rounds]
            limit = f"{100 * max(share or 0.0 for share in shares):.0f} %" if any(shares) else ""
        print(f"| {name} | {calls} | {1000 * seconds:.2f} | {100 * seconds / total:.1f} % | {limit} |")


def steps_of(output):
    """The kernels of steps: not those that prepare the weights before the first."""
    return [kernel for kernel in output["profile"]["kernels"] if not kernel["name"].startswith("prepare")]


def sum_of(output):
    return sum(kernel["seconds"] for kernel in steps_of(output))


if __name__ == "__main__":
    main()
