"""Writes tests/golden/optimizers/adamw_8bit.safetensors: AdamW with block-wise 8-bit moments over a few steps.

    pip install torch bitsandbytes numpy safetensors
    python tests/reference/make_golden_adamw_8bit.py tests/golden/optimizers/adamw_8bit.safetensors

The reference is computed here with numpy, in f32 in the order of bitsandbytes' AdamW8bit: moments are decoded from their codes, updated as
AdamW's, used for the update, and encoded again by blocks of 256 whose largest magnitude is kept as f32. The code of a number is that of
the nearest entry of bitsandbytes' dynamic map (signed for the first moment, unsigned for the second), of two equally near ones the
lower. bitsandbytes itself looks codes up approximately on a CPU: how many of its codes are others, and how far its values are from
these, is printed and stands in the file's metadata. The last block is not whole.

`start`, and for step s from 1: `gradient.s`, `value.s`, `exp_avg.s`, `exp_avg_sq.s` (codes), `exp_avg_absmax.s`, `exp_avg_sq_absmax.s`;
`signed_map` and `unsigned_map` are bitsandbytes'.
"""

import sys

import bitsandbytes
import bitsandbytes.functional as bnb
import numpy as np
import torch
from safetensors.numpy import save_file

SIZE = 16 * 256 + 104
STEPS = 4
BETAS, EPS, DECAY = (0.9, 0.999), 1e-8, 0.1
RATES = [0.01, 0.02, 0.015, 0.005]
BLOCK = 256
f32 = np.float32


def numbers(seed, scale):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(SIZE, generator=generator, dtype=torch.float32) * scale
    # Blocks of very different sizes, one of nothing but zeros.
    blocks = torch.arange(SIZE) // BLOCK
    return (values * torch.tensor(10.0) ** (blocks % 5 - 2).float() * (blocks != 7)).numpy()


def blocks(values):
    padded = np.zeros(-(-SIZE // BLOCK) * BLOCK, dtype=values.dtype)
    padded[:SIZE] = values
    return padded.reshape(-1, BLOCK)


def decode(codes, absmax, table):
    return (table[blocks(codes)] * absmax[:, None]).astype(f32).reshape(-1)[:SIZE]


def encode(values, table):
    absmax = np.abs(blocks(values)).max(axis=1).astype(f32)
    scaled = blocks(values) / np.where(absmax == 0, f32(1), absmax)[:, None]
    assert scaled.dtype == f32
    middles = (table[:-1].astype(np.float64) + table[1:].astype(np.float64)) / 2
    codes = np.searchsorted(middles, scaled.astype(np.float64), side="left").astype(np.uint8)
    return codes.reshape(-1)[:SIZE], absmax


def main():
    signed, unsigned = (bnb.create_dynamic_map(signed=sign).numpy() for sign in (True, False))
    value = numbers(0, 1.0)
    parameter = torch.nn.Parameter(torch.from_numpy(value.copy()))
    other = bitsandbytes.optim.AdamW8bit([parameter], lr=0.1, betas=BETAS, eps=EPS, weight_decay=DECAY)
    kept = {"start": value, "signed_map": signed, "unsigned_map": unsigned}
    codes = [np.searchsorted(table, f32(0)).repeat(SIZE).astype(np.uint8) for table in (signed, unsigned)]
    absmax = [np.zeros(-(-SIZE // BLOCK), dtype=f32) for _ in range(2)]
    agreement = {}
    for step in range(1, STEPS + 1):
        rate, gradient = RATES[step - 1], numbers(step, 0.5)
        first, second = (decode(codes[i], absmax[i], table) for i, table in enumerate((signed, unsigned)))
        first = first * f32(BETAS[0]) + gradient * f32(1 - BETAS[0])
        second = second * f32(BETAS[1]) + gradient * f32(1 - BETAS[1]) * gradient
        corrections = [1 - beta**step for beta in BETAS]
        root = np.sqrt(second) * f32(1 / np.sqrt(corrections[1])) + f32(EPS)
        value = value * f32(1 - rate * DECAY) - first * f32(rate / corrections[0]) / root
        assert value.dtype == f32
        (codes[0], absmax[0]), (codes[1], absmax[1]) = encode(first, signed), encode(second, unsigned)
        kept |= {f"gradient.{step}": gradient, f"value.{step}": value}
        for name, code, largest in zip(("exp_avg", "exp_avg_sq"), codes, absmax):
            kept |= {f"{name}.{step}": code.copy(), f"{name}_absmax.{step}": largest.copy()}
        other.param_groups[0]["lr"] = rate
        parameter.grad = torch.from_numpy(gradient)
        other.step()
        state = other.state[parameter]
        theirs = parameter.detach().numpy()
        moved = np.abs(value - kept["start"]).max()
        # Where the largest is 0, any code is 0.
        counted = np.repeat(absmax[0] != 0, BLOCK)[:SIZE]
        apart = [np.abs(state[f"state{i + 1}"].numpy().astype(int) - codes[i])[counted] for i in range(2)]
        shares, largest = [np.mean(codes != 0) for codes in apart], [codes.max() for codes in apart]
        agreement[f"step {step}"] = (
            f"{shares[0]:.4f} and {shares[1]:.4f} of the codes differ from bitsandbytes', by at most {largest[0]} and {largest[1]}; "
            f"values by {np.abs(theirs - value).max() / moved:.2e} of the largest change"
        )
    versions = {"torch": torch.__version__, "bitsandbytes": bitsandbytes.__version__, "numpy": np.__version__}
    for name, text in agreement.items():
        print(f"{name}: {text}")
    save_file(kept, sys.argv[1], {**versions, **agreement})


main()
