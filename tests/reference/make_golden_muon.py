"""Writes tests/golden/optimizers/muon.json: torch.optim.Muon over a few steps, and AdamW where it leaves tensors to that.

    pip install 'torch>=2.9' && python tests/reference/make_golden_muon.py tests/golden/optimizers/muon.json

The form is that of `make_golden_lion.py`. torch iterates in bf16, whose last digits depend on the order of sums: `tolerance` is a share of
the largest element. The values are compared with where they started, so that it is the updates that agree.
"""

import json
import sys

import torch

STEPS = 4
RATES = [0.02, 0.05, 0.03, 0.01]


def numbers(seed, shape, scale):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32) * scale


def listed(tensor):
    """Its elements, in as many digits as an f32 has."""
    return [float(f"{value:.9g}") for value in tensor.flatten().tolist()]


def trajectory(name, tensor, shape, muon, adamw, make, kept):
    start = numbers(0, shape, 1.0)
    gradients = [numbers(1 + step, shape, 0.5) for step in range(STEPS)]
    parameter = torch.nn.Parameter(start.clone())
    optimizer = make(parameter)
    is_muon = isinstance(optimizer, torch.optim.Muon)
    case = {
        "name": name,
        "optimizer": {"name": "muon", **muon, "adamw": adamw},
        "tensor": {"name": tensor, "shape": list(shape)},
        "start": listed(start),
        "gradients": [listed(gradient) for gradient in gradients],
        "learning_rates": RATES,
        "tolerance": 2e-2 if is_muon else 1e-6,
        "state_tolerance": 1e-6,
        "compare": "updates" if is_muon else "values",
        "values": [],
        "state": {state: [] for state in kept},
    }
    for gradient, rate in zip(gradients, RATES):
        optimizer.param_groups[0]["lr"] = rate
        parameter.grad = gradient.clone()
        optimizer.step()
        case["values"].append(listed(parameter.detach()))
        for state in kept:
            case["state"][state].append(listed(optimizer.state[parameter][state]))
    return case


def main():
    adamw = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.2}
    hidden = "model.layers.0.mlp.up_proj.weight"
    cases = []
    for shape in [(6, 6), (4, 10), (10, 4)]:
        for adjust, nesterov, decay in [("original", True, 0.1), ("match_rms_adamw", True, 0.0), ("original", False, 0.3)]:
            muon = {"momentum": 0.95, "nesterov": nesterov, "weight_decay": decay, "adjust_lr": adjust}
            make = lambda parameter, muon=muon: torch.optim.Muon(
                [parameter],
                momentum=muon["momentum"],
                nesterov=muon["nesterov"],
                weight_decay=muon["weight_decay"],
                adjust_lr_fn=muon["adjust_lr"],
            )
            name = f"{shape[0]} x {shape[1]}, {adjust}, nesterov {nesterov}"
            cases.append(trajectory(name, hidden, shape, muon, adamw, make, ["momentum_buffer"]))
    plain = {"momentum": 0.95, "nesterov": True, "weight_decay": 0.1, "adjust_lr": "original"}
    make = lambda parameter: torch.optim.AdamW([parameter], **adamw)
    for name, shape in [("model.norm.weight", (6,)), ("model.embed_tokens.weight", (5, 3)), ("lm_head.weight", (5, 3))]:
        cases.append(trajectory(f"AdamW of {name}", name, shape, plain, adamw, make, ["exp_avg", "exp_avg_sq"]))
    with open(sys.argv[1], "w") as file:
        json.dump({"torch": torch.__version__, "cases": cases}, file)
        file.write("\n")


main()
