#!/usr/bin/env python3
"""Writes what PEFT makes of several adapters with weights: `weighted.safetensors` beside the LoRA variants of llama31.

    pip install torch transformers peft safetensors
    python make_golden_merge.py [../golden/llama31]

`both.*` is `add_weighted_adapter(["attention", "all_linear"], [0.75, -0.5], combination_type="cat")`, adapters of different ranks,
scalings and targets; `half.*` is `attention` alone with weight 0.5 (for one adapter PEFT always takes "linear"). Each has two merged
weights after `merge_and_unload`, and the logits of `check.input_ids` before (`adapted_logits`) and after it (`merged_logits`).
"""

import pathlib
import sys

import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

WEIGHTS = ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"]


def case(folder, name, adapters, weights, ids):
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder / "lora" / adapters[0] / "adapter", adapter_name=adapters[0])
    for other in adapters[1:]:
        model.load_adapter(folder / "lora" / other / "adapter", adapter_name=other)
    model.add_weighted_adapter(adapters, weights, "sum", combination_type="cat")
    model.set_adapter("sum")
    model.eval()
    with torch.no_grad():
        adapted = model(ids).logits
        merged = model.merge_and_unload()
        found = {f"{name}.{weight}": merged.state_dict()[weight] for weight in WEIGHTS}
        found |= {f"{name}.adapted_logits": adapted, f"{name}.merged_logits": merged(ids).logits}
    return {key: value.contiguous() for key, value in found.items()}


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "../golden/llama31")
    ids = torch.randint(3, 320, (1, 24), generator=torch.Generator().manual_seed(11))
    cases = {"check.input_ids": ids}
    cases |= case(folder, "both", ["attention", "all_linear"], [0.75, -0.5], ids)
    cases |= case(folder, "half", ["attention"], [0.5], ids)
    save_file(cases, folder / "lora" / "weighted.safetensors")


main()
