"""Checkpoints of architectures that the native backend lacks, and what plain transformers and PEFT make of them.

`make FAMILY FOLDER TOKENIZER` writes a checkpoint; `train BASE TOKENS ADAPTER RATE` prints the losses of a plain training loop over two
rows a step, of all weights where ADAPTER is `none`; `compare BASE ADAPTER MERGED` prints how far logits are apart.
"""

import json
import shutil
import sys
from pathlib import Path

import pyarrow.parquet as parquet
import torch
import torch.nn.functional as F
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

SHAPE = {
    "vocab_size": 2064,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OF_FAMILY = {
    "olmo2": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
}


def make(family, folder, tokenizer):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE, **OF_FAMILY[family]))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.2 * noise if parameter.dim() > 1 else 1 + 0.1 * noise)
    model.save_pretrained(folder)
    for file in Path(tokenizer).iterdir():
        shutil.copyfile(file, Path(folder) / file.name)


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def rows(tokens):
    for part in sorted(Path(tokens).rglob("*.parquet")):
        table = parquet.read_table(part, columns=["input_ids", "labels"]).to_pydict()
        yield from zip(table["input_ids"], table["labels"], strict=True)


def train(base, tokens, adapter, rate):
    model = load(base)
    if adapter != "none":
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True).eval()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=float(rate), betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    data = list(rows(tokens))
    losses = []
    for start in range(0, len(data), 2):
        nll = []
        for ids, labels in data[start : start + 2]:
            logits, labels = model(input_ids=torch.tensor([ids])).logits[0], torch.tensor(labels)
            nll.append(F.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="none")[labels[1:] != -100])
        loss = torch.cat(nll).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    print(json.dumps(losses))


@torch.no_grad()
def compare(base, adapter, merged):
    ids = torch.arange(3, 40)[None]
    adapted = PeftModel.from_pretrained(load(base), adapter).eval()(input_ids=ids).logits
    plain = load(base)(input_ids=ids).logits
    apart = (adapted - load(merged)(input_ids=ids).logits).abs().max()
    print(json.dumps({"merged": float(apart), "base": float((adapted - plain).abs().max())}))


if __name__ == "__main__":
    {"make": make, "train": train, "compare": compare}[sys.argv[1]](*sys.argv[2:])
