"""Loads a quantised model with transformers and bitsandbytes, and compares its weights with others: FOLDER EXPECTED."""

import sys

import torch
from bitsandbytes import functional
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

folder, expected = sys.argv[1:]
expected = load_file(expected)
model = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")
compared = 0
for name, module in model.named_modules():
    if isinstance(module, Linear4bit):
        state = module.weight.quant_state
        values = functional.get_4bit_type(state.quant_type, device="cpu")
        codes = torch.stack([module.weight.data.flatten() >> 4, module.weight.data.flatten() & 15], dim=1).flatten().long()
        absmax = state.absmax
        if state.nested:
            absmax = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
        count = expected[f"{name}.weight"].numel()
        found = values[codes][:count] * absmax.float().repeat_interleave(state.blocksize)[:count]
        assert list(state.shape) == list(expected[f"{name}.weight"].shape), name
    elif isinstance(module, Linear8bitLt):
        scales = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
        found = module.weight.data.float() * scales.view(-1, 1) / 127
    else:
        continue
    difference = (found.view(-1) - expected[f"{name}.weight"].float().view(-1)).abs().max().item()
    assert difference < 1e-6, f"{name}: {difference}"
    compared += 1
logits = model(torch.tensor([[5, 9, 2, 6, 5, 3]])).logits
assert torch.isfinite(logits).all()
print(f"{compared} layers compared")
