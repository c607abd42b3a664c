#!/usr/bin/env python3
"""Loads what a pipeline made in the libraries that define its form, and compares their numbers with ours.

    pip install torch transformers peft safetensors
    python tests/reference/check_export.py --base BASE --adapter ADAPTER --merged MERGED

BASE and MERGED are model folders, ADAPTER a PEFT folder, as `publish:` or `pipeline export` write them. Three things are checked:
no tensor is missing or left over when transformers and PEFT load them; base with adapter and the merged model give the same logits
there, within a bound for the stored type; and the differences that `merge_report.json` states are of that size.
"""

import argparse
import json
import pathlib
import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

BOUNDS = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def load(folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[what]:
            sys.exit(f"{folder}: {what}: {sorted(info[what])[:5]}")
    return model.eval()


def main():
    parser = argparse.ArgumentParser()
    for name in ("base", "adapter", "merged"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    arguments = parser.parse_args()

    base, merged = load(arguments.base), load(arguments.merged)
    dtype = next(merged.parameters()).dtype
    ids = torch.randint(0, base.config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = base(ids).logits.float()
        adapted = PeftModel.from_pretrained(base, arguments.adapter).eval()(ids).logits.float()
        found = merged(ids).logits.float()
    difference = (adapted - found).abs().max().item()
    largest = adapted.abs().max().item()
    moved = (adapted - plain).abs().max().item()
    print(f"adapter changes the logits by {moved:.3e}; merged and adapted differ by {difference:.3e} of {largest:.3e}")
    print("ours:", json.dumps(json.loads((arguments.merged / "merge_report.json").read_text())["proof"]["max_abs_logit_difference"]))
    if not difference <= BOUNDS[dtype] * largest or not moved > difference:
        sys.exit("the merged model is not base with adapter")


main()
