"""Writes tests/golden/optimizers.json: what torch's optimizers and its GradScaler do over a few steps.

    pip install torch && python tests/reference/make_golden_optimizers.py tests/golden/optimizers.json

`optimizers`: each case starts at `start` and takes ten steps with `gradients` and `learning_rates` (the same in all
cases, in f32); `values`, `exp_avg` and `exp_avg_sq` are those after each step. SGD's momentum buffer is its `exp_avg`.
`grad_scaler`: each case has the settings of a GradScaler, which steps have a gradient that is infinite, and after each
step the factor, the steps without an overflow since it last changed, and whether the optimizer's step was skipped.
"""

import json
import sys

import torch

STEPS = 10
SIZE = 6


def numbers(seed, count, scale):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator, dtype=torch.float32) * scale


def trajectory(name, make, start, gradients, rates):
    parameter = torch.nn.Parameter(start.clone())
    optimizer = make([parameter])
    case = {"name": name, "settings": {}, "values": [], "exp_avg": [], "exp_avg_sq": []}
    for gradient, rate in zip(gradients, rates):
        optimizer.param_groups[0]["lr"] = rate
        parameter.grad = gradient.clone()
        optimizer.step()
        state = optimizer.state[parameter]
        first = state.get("exp_avg", state.get("momentum_buffer"))
        second = state.get("exp_avg_sq")
        case["values"].append(parameter.detach().tolist())
        case["exp_avg"].append([] if first is None else first.tolist())
        case["exp_avg_sq"].append([] if second is None else second.tolist())
    group = optimizer.param_groups[0]
    for key in ("betas", "eps", "weight_decay", "momentum", "dampening", "nesterov"):
        if key in group:
            case["settings"][key] = group[key]
    return case


def optimizers():
    start = numbers(0, SIZE, 1.0)
    gradients = [numbers(1 + step, SIZE, 0.5) for step in range(STEPS)]
    rates = [0.0, 0.01, 0.02, 0.03, 0.03, 0.025, 0.02, 0.015, 0.01, 0.005]
    adamw = lambda **more: lambda parameters: torch.optim.AdamW(parameters, lr=0.1, **more)
    sgd = lambda **more: lambda parameters: torch.optim.SGD(parameters, lr=0.1, **more)
    cases = [
        ("adamw", adamw()),
        ("adamw, heavy decay", adamw(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)),
        ("sgd", sgd()),
        ("sgd, decay", sgd(weight_decay=0.1)),
        ("sgd, momentum", sgd(momentum=0.9)),
        ("sgd, momentum, dampening, decay", sgd(momentum=0.9, dampening=0.4, weight_decay=0.1)),
        ("sgd, nesterov, decay", sgd(momentum=0.9, nesterov=True, weight_decay=0.1)),
    ]
    return {
        "start": start.tolist(),
        "gradients": [gradient.tolist() for gradient in gradients],
        "learning_rates": rates,
        "cases": [trajectory(name, make, start, gradients, rates) for name, make in cases],
    }


def scaled_run(settings, overflows):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.125)
    scaler = torch.amp.GradScaler("cpu", **settings)
    case = {"settings": settings, "overflows": overflows, "scale": [], "growth_tracker": [], "skipped": []}
    for overflow in overflows:
        optimizer.zero_grad()
        scaler.scale((parameter * torch.tensor([0.25, 0.5])).sum()).backward()
        if overflow:
            parameter.grad[1] = float("inf")
        before = parameter.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        case["scale"].append(scaler.get_scale())
        case["growth_tracker"].append(scaler._get_growth_tracker())
        case["skipped"].append(bool(torch.equal(before, parameter.detach())))
    return case


def grad_scaler():
    calm, burst = [False] * 3, [True, True]
    return [
        scaled_run(
            {"init_scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3},
            calm + burst + calm * 3 + [True] + calm,
        ),
        scaled_run(
            {"init_scale": 65536.0, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 2},
            burst + calm * 2 + burst + calm * 3,
        ),
        # Grown beyond f32 the factor stays where it is.
        scaled_run(
            {"init_scale": 2.0**126, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1}, calm * 2
        ),
    ]


def main():
    golden = {"torch": torch.__version__, "optimizers": optimizers(), "grad_scaler": grad_scaler()}
    with open(sys.argv[1], "w") as file:
        json.dump(golden, file, indent=1)
        file.write("\n")


main()
