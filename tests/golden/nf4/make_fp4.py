"""Makes fp4.safetensors: FP4 of bitsandbytes on a CPU (bitsandbytes 0.50.2, torch 2.15).

Codes are those of its portable path; values are multiplied here, as its CPU library takes a wrong absmax for rows that are no
multiple of 64.
"""

from pathlib import Path

import torch
from bitsandbytes import functional
from safetensors.torch import save_file

torch.manual_seed(7)
normal = torch.randn(48, 80)
normal[0, :8] = torch.tensor([0.0, -0.0, 1e-6, -1e-6, 0.002, -0.002, 0.003, -0.003])
normal[3, :64] = 0.0
tensors = {}
for name, source in {"normal": normal, "bf16": torch.randn(32, 64).to(torch.bfloat16)}.items():
    packed, state = functional.quantize_4bit(source, blocksize=64, quant_type="fp4")
    codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], dim=1).flatten().long()
    values = functional.get_4bit_type("fp4", device="cpu")[codes].view(-1, 64) * state.absmax.view(-1, 1)
    tensors |= {f"{name}.source": source, f"{name}.packed": packed, f"{name}.absmax": state.absmax}
    tensors[f"{name}.dequantised"] = values.view(source.shape).to(source.dtype)
save_file(tensors, Path(__file__).parent / "fp4.safetensors")
