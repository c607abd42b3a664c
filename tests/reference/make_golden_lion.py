"""Writes tests/golden/optimizers/lion.json: Lion over a few steps, from its paper.

    pip install torch bitsandbytes && python tests/reference/make_golden_lion.py tests/golden/optimizers/lion.json

torch has no Lion. The reference is algorithm 2 of Chen et al., arXiv:2302.06675, in f64; bitsandbytes' Lion with its state in f32
has to agree to 1e-6. Each case has an `optimizer` as in a job, a `tensor`, the `start`, and for each step a gradient, a learning
rate, and the value and state after it.
"""

import json
import sys

import bitsandbytes
import torch

STEPS = 8


def numbers(seed, shape, scale):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32) * scale


def listed(tensor):
    """Its elements, in as many digits as an f32 has."""
    return [float(f"{value:.9g}") for value in tensor.flatten().tolist()]


def trajectory(name, shape, betas, weight_decay):
    start = numbers(0, shape, 1.0)
    gradients = [numbers(1 + step, shape, 0.5) for step in range(STEPS)]
    # Where nothing ever arrives, the sign is 0.
    for gradient in gradients:
        gradient.view(-1)[2] = 0.0
    rates = [0.0, 0.01, 0.02, 0.03, 0.025, 0.02, 0.01, 0.005]
    case = {
        "name": name,
        "optimizer": {"name": "lion", "betas": betas, "weight_decay": weight_decay},
        "tensor": {"name": "weight", "shape": list(shape)},
        "start": listed(start),
        "gradients": [listed(gradient) for gradient in gradients],
        "learning_rates": rates,
        "tolerance": 1e-6,
        "values": [],
        "state": {"exp_avg": []},
    }
    value, momentum = start.double(), torch.zeros(shape, dtype=torch.float64)
    parameter = torch.nn.Parameter(start.clone())
    other = bitsandbytes.optim.Lion32bit([parameter], lr=0.1, betas=tuple(betas), weight_decay=weight_decay)
    beta1, beta2 = betas
    for gradient, rate in zip(gradients, rates):
        direction = torch.sign(beta1 * momentum + (1 - beta1) * gradient.double())
        value = value - rate * (direction + weight_decay * value)
        momentum = beta2 * momentum + (1 - beta2) * gradient.double()
        other.param_groups[0]["lr"] = rate
        parameter.grad = gradient.clone()
        other.step()
        torch.testing.assert_close(parameter.detach().double(), value, rtol=1e-6, atol=1e-6)
        case["values"].append(listed(value.float()))
        case["state"]["exp_avg"].append(listed(momentum.float()))
    return case


def main():
    cases = [
        trajectory("defaults", (6,), [0.9, 0.99], 0.0),
        trajectory("heavy decay, a matrix", (3, 5), [0.95, 0.98], 0.3),
    ]
    golden = {"torch": torch.__version__, "bitsandbytes": bitsandbytes.__version__, "cases": cases}
    with open(sys.argv[1], "w") as file:
        json.dump(golden, file, indent=1)
        file.write("\n")


main()
