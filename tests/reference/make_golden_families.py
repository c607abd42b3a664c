#!/usr/bin/env python3
"""Writes golden cases for what the checkpoints of a family may say beyond the family's usual form: other kinds of rotary embedding,
windows on and off, biases, number types, shards, tied heads. Form and meaning are those of make_golden.py, at half the size.

    pip install torch transformers peft safetensors
    python make_golden_families.py OUT_DIR [--only phi3_longrope,llama32]

One folder per case: config.json, the weights (one file, or shards with an index), expected.safetensors; phi3_longrope also has
lora/attention. Logits come from the stored (rounded) weights, computed in f32. Where transformers chooses frequencies by the longest
position of a whole batch (longrope), the documents of a packed row are run one by one.
"""
import argparse
import json
import pathlib

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutput

import make_golden

VOCAB = 96
SHAPE = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
             max_position_embeddings=128, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2, pad_token_id=None, tie_word_embeddings=False)
# One factor per turning pair: 8 pairs in a head of 16, 6 where three quarters of it turn.
SHORT = [1.0, 1.02, 1.05, 1.1, 1.3, 1.5, 1.8, 2.2]
LONG = [1.1, 1.4, 2.0, 3.0, 4.5, 6.0, 8.0, 11.0]


def cases():
    """name -> (class of the configuration, its values, spelling of the file, number type, largest shard)"""
    from transformers import Gemma2Config, LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config
    longrope = lambda pairs: dict(rope_type="longrope", short_factor=SHORT[:pairs], long_factor=LONG[:pairs])
    llama3 = dict(rope_type="llama3", rope_theta=500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
                  original_max_position_embeddings=64)
    theta = lambda theta: dict(rope_parameters=dict(rope_type="default", rope_theta=theta))
    scaled = lambda **settings: dict(rope_parameters=dict(rope_theta=10000.0, **settings))
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    whole = "1GB"
    return {
        # Phi-3-mini-128k: the original length stands beside the factors.
        "phi3_longrope": (Phi3Config, scaled(**longrope(8)) | dict(original_max_position_embeddings=16, sliding_window=None), "v4", f32, whole),
        # Phi-4-mini: longrope over three quarters of a head, tied.
        "phi3_longrope_partial": (Phi3Config, scaled(**longrope(6), partial_rotary_factor=0.75)
                                  | dict(original_max_position_embeddings=16, tie_word_embeddings=True), "v5", bf16, whole),
        "phi3_partial_rotary": (Phi3Config, scaled(rope_type="default", partial_rotary_factor=0.5), "v4", f32, whole),
        # Code Llama: as many key heads as query heads, a large theta, a vocabulary that is not a round number.
        "code_llama": (LlamaConfig, theta(1e6) | dict(num_key_value_heads=2, vocab_size=VOCAB - 5), "v4", f32, whole),
        # Llama 3.2: a tied head that is not in the file.
        "llama32": (LlamaConfig, dict(rope_parameters=llama3, tie_word_embeddings=True), "v4", bf16, whole),
        "llama_bf16_shards": (LlamaConfig, theta(10000.0), "v4", bf16, "15KB"),
        "llama_f16": (LlamaConfig, theta(10000.0), "v5", f16, whole),
        "llama_biases": (LlamaConfig, theta(10000.0) | dict(attention_bias=True, mlp_bias=True), "v5", f32, whole),
        "llama_linear": (LlamaConfig, scaled(rope_type="linear", factor=4.0), "v4", f32, whole),
        "llama_dynamic": (LlamaConfig, scaled(rope_type="dynamic", factor=2.0), "v4", f32, whole),
        "llama_yarn": (LlamaConfig, scaled(rope_type="yarn", factor=8.0, original_max_position_embeddings=16, beta_fast=1.0, beta_slow=0.1,
                                           mscale=0.7, mscale_all_dim=0.3, truncate=False), "v5", f32, whole),
        # Mistral v0.3: no window.
        "mistral_no_window": (MistralConfig, theta(1e6) | dict(sliding_window=None), "v4", bf16, whole),
        "qwen2_windows": (Qwen2Config, theta(1e6) | dict(use_sliding_window=True, sliding_window=8, max_window_layers=1), "v4", f32, whole),
        # Qwen 2.5, as its own page says to stretch it.
        "qwen2_yarn": (Qwen2Config, scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=32), "v4", bf16, whole),
        "qwen3_tied_windows": (Qwen3Config, theta(1e6) | dict(head_dim=24, tie_word_embeddings=True, use_sliding_window=True, sliding_window=8,
                                                             max_window_layers=1), "v5", bf16, whole),
        "qwen3_biases": (Qwen3Config, theta(1e6) | dict(head_dim=24, attention_bias=True), "v4", f32, whole),
        # Without layer_types every other layer has the window; an untied head; no cap on the scores.
        "gemma2_untied": (Gemma2Config, theta(10000.0) | dict(head_dim=24, sliding_window=8, query_pre_attn_scalar=40, rms_norm_eps=1e-4,
                          attn_logit_softcapping=None, final_logit_softcapping=10.0), "v4", f32, whole),
    }


def hub_spelling(folder):
    """What stands beside rope_scaling in older files, and under which names."""
    path = folder / "config.json"
    before = json.loads(path.read_text())
    make_golden.v4_config(path)
    config = json.loads(path.read_text())
    scaling = config["rope_scaling"] or {}
    partial = (before["rope_parameters"] or {}).get("partial_rotary_factor", 1.0)
    scaling.pop("partial_rotary_factor", None)
    if partial != 1.0:
        config["partial_rotary_factor"] = partial
    if scaling.get("rope_type") in ("linear", "dynamic", "yarn", "longrope"):
        scaling["type"] = scaling.pop("rope_type")
    if scaling.get("type") == "longrope":
        del scaling["original_max_position_embeddings"]
    if config["model_type"] == "qwen2":
        config["sliding_window"] = before["sliding_window"]
    path.write_text(json.dumps(config, indent=2) + "\n")


def one_by_one(model):
    """Makes a model run the documents of a packed row apart, each from position 0."""
    forward = model.forward

    def by_document(input_ids=None, position_ids=None, attention_mask=None, **more):
        starts = [] if position_ids is None else (position_ids[0] == 0).nonzero().flatten().tolist()
        if len(starts) < 2:
            return forward(input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, **more)
        ends = starts[1:] + [input_ids.shape[1]]
        return CausalLMOutput(logits=torch.cat([forward(input_ids=input_ids[:, a:b]).logits for a, b in zip(starts, ends)], 1))

    model.forward = by_document
    return model


def write(folder, values, family, spelling, dtype, shard):
    config = family(**(SHAPE | values))

    def stored():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        make_golden.randomise(model, 0)
        return model.to(dtype)

    folder.mkdir(parents=True, exist_ok=True)
    stored().save_pretrained(folder, max_shard_size=shard)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if spelling == "v4":
        hub_spelling(folder)
    assert (folder / "model.safetensors.index.json").exists() == (shard != "1GB")

    def reference():
        """What transformers makes of the files written, in f32."""
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        return one_by_one(model.eval())

    model = reference()
    expected = make_golden.forward_case(model, model.config, model.config.vocab_size, 0)
    ids, prompt = expected["greedy_ids"], expected["greedy_prompt"].shape[1]
    with torch.no_grad():                   # longrope: a longer sequence changes the logits of its first tokens too
        alone = torch.stack([model(input_ids=ids[:, :length]).logits[:, -1] for length in range(prompt, ids.shape[1])], 1)
    assert torch.allclose(alone, expected["greedy_logits"], atol=1e-4), "transformers' cache does not give what it gives without"
    save_file({name: value.contiguous() for name, value in expected.items()}, folder / "expected.safetensors")
    return reference


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    for name, (family, values, spelling, dtype, shard) in cases().items():
        if arguments.only and name not in arguments.only.split(","):
            continue
        folder = arguments.out / name
        reference = write(folder, values, family, spelling, dtype, shard)
        if name == "phi3_longrope":
            make_golden.lora_case(reference, folder / "lora" / "attention", VOCAB, 0, dict(r=4, lora_alpha=8, target_modules=["qkv_proj"]), 0.9)
        print(name, "written")
    assert transformers.__version__.startswith("5."), "the cases in the repository come from transformers 5"


if __name__ == "__main__":
    main()
