"""DPO's f-divergences, with torch: tests/golden/dpo_divergences.json.

    python make_golden_divergences.py ../golden/dpo_divergences.json

The reward of a log-ratio r = log(pi / pi_ref) is f'(e^r) (Wang et al., arXiv:2309.16240, table 1); derivatives are autograd's, in f64.
"""

import json
import sys

import torch

RATIOS = {
    "reverse_kl": lambda u, _: torch.log(u) + 1,
    "forward_kl": lambda u, _: -1 / u,
    "jensen_shannon": lambda u, _: torch.log(2 * u / (1 + u)),
    "alpha": lambda u, alpha: (1 - u**-alpha) / alpha,
}
ROWS = [
    (-42.3125, -45.125, -43.5, -44.0, 12, 17),
    (-38.75, -30.5, -35.25, -33.125, 9, 8),
    (-80.0, -95.0, -60.0, -70.0, 30, 22),
    (-20.0, -24.0, -31.0, -30.0, 10, 11),
    (-12.5, -12.5, -13.0, -13.0, 5, 5),
]
CASES = [
    (name, alpha, beta, smoothing, normalized)
    for name, alpha in [("reverse_kl", None), ("forward_kl", None), ("jensen_shannon", None), ("alpha", 0.5), ("alpha", 0.2)]
    for beta, smoothing, normalized in [(0.1, 0.0, False), (2.0, 0.1, True)]
]


def case(name, alpha, beta, smoothing, normalized):
    rows = []
    for chosen, rejected, reference_chosen, reference_rejected, chosen_length, rejected_length in ROWS:
        logps = torch.tensor([chosen, rejected], dtype=torch.float64, requires_grad=True)
        ratios = logps - torch.tensor([reference_chosen, reference_rejected], dtype=torch.float64)
        if normalized:
            ratios = ratios / torch.tensor([chosen_length, rejected_length], dtype=torch.float64)
        rewards = RATIOS[name](torch.exp(ratios), alpha)
        x = beta * (rewards[0] - rewards[1])
        log_sigmoid = torch.nn.functional.logsigmoid
        loss = -(1 - smoothing) * log_sigmoid(x) - smoothing * log_sigmoid(-x)
        loss.backward()
        rows.append(
            {
                "chosen_logp": chosen,
                "rejected_logp": rejected,
                "ref_chosen_logp": reference_chosen,
                "ref_rejected_logp": reference_rejected,
                "chosen_len": chosen_length,
                "rejected_len": rejected_length,
                "loss": loss.item(),
                "grad_chosen": logps.grad[0].item(),
                "grad_rejected": logps.grad[1].item(),
            }
        )
    return {
        "divergence": name,
        "alpha": alpha,
        "beta": beta,
        "label_smoothing": smoothing,
        "length_normalized": normalized,
        "rows": rows,
    }


with open(sys.argv[1], "w") as file:
    json.dump([case(*settings) for settings in CASES], file, indent=1)
    file.write("\n")
