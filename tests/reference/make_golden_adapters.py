#!/usr/bin/env python3
"""Writes the reference results for adapters that make_golden.py has not: LoRA on the head, modules that are trained as a whole, patterns
of ranks and targets, DoRA on fused projections, and training that goes on from an adapter that PEFT wrote.

The models are make_golden.py's, and so is the way of training, with another seed for each case. Each case is one more folder
`<family>/lora/<variant>/` with the same files as the others.

    pip install torch transformers peft safetensors
    python make_golden_adapters.py OUT_DIR [--only llama31/lm_head,phi3/dora]

OUT_DIR holds the folders that make_golden.py wrote.
"""
import argparse, pathlib
import torch
from transformers import AutoModelForCausalLM
from make_golden import families, lora_case, randomise

ATTENTION = ["q_proj", "v_proj"]
PATTERNS = dict(
    r=4, lora_alpha=8, use_rslora=True,
    target_modules=r"model\.layers\.\d+\.(self_attn\.(q|o)_proj|mlp\.(up|down)_proj)",
    rank_pattern={r"layers\.1\.self_attn\..*_proj": 2, "down_proj": 6},
    alpha_pattern={r"^model\.layers\.0\.mlp\.up_proj": 3, "q_proj": 5},
)
FUSED = dict(
    r=4, lora_alpha=8, use_dora=True, target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    rank_pattern={"gate_up_proj": 3}, alpha_pattern={r"layers\.1\..*qkv_proj": 6},
)

# family, variant -> settings, clip, matrices kept beside those of layer 0
CASES = {
    ("llama31", "lm_head"): (dict(r=4, lora_alpha=8, target_modules=["q_proj", "lm_head"]), 0.65, ["lm_head"]),
    ("qwen2", "tied_lm_head"): (dict(r=4, lora_alpha=8, target_modules=["q_proj", "lm_head"]), 0.59, ["lm_head", "embed_tokens"]),
    ("gemma2", "dora_lm_head"): (dict(r=4, lora_alpha=8, use_dora=True, target_modules=["v_proj", "lm_head"]), 0.55, ["lm_head"]),
    ("llama31", "modules_to_save"): (
        dict(r=4, lora_alpha=8, target_modules=ATTENTION, modules_to_save=["embed_tokens", "lm_head"]), 3.6, ["lm_head", "embed_tokens"]),
    ("llama2", "norms"): (dict(r=4, lora_alpha=8, target_modules=ATTENTION, modules_to_save=["norm"]), 1.07, []),
    ("qwen2", "tied_lm_head_saved"): (
        dict(r=4, lora_alpha=8, target_modules=ATTENTION, modules_to_save=["lm_head", "k_proj"]), 2.08, ["lm_head", "embed_tokens"]),
    ("gemma", "tied_embedding_saved"): (
        dict(r=4, lora_alpha=8, target_modules=ATTENTION, modules_to_save=["embed_tokens"]), 2.42, ["lm_head", "embed_tokens"]),
    ("qwen3", "tied_both_saved"): (
        dict(r=4, lora_alpha=8, target_modules=ATTENTION, modules_to_save=["embed_tokens", "lm_head"]), 3.1, ["lm_head", "embed_tokens"]),
    ("llama31", "patterns"): (PATTERNS, 2.0, []),
    ("phi3", "dora"): (FUSED, 1.62, []),
    ("mistral", "layers"): (
        dict(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "down_proj"], layers_to_transform=[1], exclude_modules=["k_proj"]), 0.335, []),
    ("llama31", "warm_start"): (dict(r=4, lora_alpha=8, target_modules=ATTENTION), 0.85, []),
}

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out"); parser.add_argument("--seed", type=int, default=0); parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    out, hidden_size, vocab = pathlib.Path(arguments.out), 64, 320
    for number, ((family, variant), (settings, clip, kept)) in enumerate(CASES.items()):
        if arguments.only and f"{family}/{variant}" not in arguments.only.split(","): continue
        config = families(hidden_size, vocab)[family][0]
        config._attn_implementation = "eager"
        def make():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
            randomise(model, arguments.seed)
            return model.eval()
        folder = out / family / "lora"
        start = folder / "attention" / "adapter" if variant == "warm_start" else None
        keep = lambda name: "layers.0." in name or any(part in name for part in kept)
        lora_case(make, folder / variant, vocab, arguments.seed + 100 + 20 * number, settings, clip, start=start, keep=keep)
        print(family, variant, "written")

if __name__ == "__main__":
    main()
