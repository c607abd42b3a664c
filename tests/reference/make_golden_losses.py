"""Writes tests/golden/losses.json: losses of single targets and their gradients with respect to the logits, from torch.

Run with torch (made with 2.15.0, on one thread in f64):  python tests/reference/make_golden_losses.py

Cross-entropy with label smoothing is torch.nn.functional.cross_entropy. The divergences of distillation are
torch.nn.functional.kl_div over softmax(logits / temperature); total = (1 - alpha) * cross_entropy
+ alpha * temperature**2 * divergence. With weights the loss of all rows is sum(weight * loss) / sum(weight), and the
gradients are those of that. `soft_cap` caps the student's logits by cap * tanh(x / cap); the teacher's are given capped.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F

ROWS, VOCABULARY = 5, 23


def main():
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(20)
    draw = lambda scale: (torch.randn(ROWS, VOCABULARY, generator=generator) * scale).float().double()
    logits, teacher = draw(3.0), draw(2.5)
    targets = torch.tensor([4, 22, 0, 9, 9])
    weights = torch.tensor([1.0, 0.25, 2.0, 0.0, 0.5], dtype=torch.float64)
    cases = []

    def case(name, soft_cap, loss_of_rows):
        x = logits.clone().requires_grad_()
        capped = x if soft_cap is None else soft_cap * torch.tanh(x / soft_cap)
        losses = loss_of_rows(capped)
        total = (weights * losses).sum() / weights.sum()
        total.backward()
        cases.append({**name, "soft_cap": soft_cap, "losses": losses.tolist(), "total": total.item(),
                      "gradient": x.grad.flatten().tolist()})

    for soft_cap in [None, 4.0]:
        for smoothing in [0.0, 0.1, 0.5]:
            case({"loss": "cross_entropy", "label_smoothing": smoothing}, soft_cap,
                 lambda z: F.cross_entropy(z, targets, reduction="none", label_smoothing=smoothing))
        for divergence in ["forward_kl", "reverse_kl", "jensen_shannon"]:
            for temperature, alpha in [(1.0, 1.0), (2.0, 0.5), (0.7, 0.25)]:
                def loss(z):
                    log_q = F.log_softmax(z / temperature, 1)
                    log_p = F.log_softmax(teacher / temperature, 1)
                    kl = lambda of, other: F.kl_div(other, of, reduction="none", log_target=True).sum(1)
                    if divergence == "forward_kl":
                        compared = kl(log_p, log_q)
                    elif divergence == "reverse_kl":
                        compared = kl(log_q, log_p)
                    else:
                        log_m = torch.log(0.5 * (log_p.exp() + log_q.exp()))
                        compared = 0.5 * kl(log_p, log_m) + 0.5 * kl(log_q, log_m)
                    hard = F.cross_entropy(z, targets, reduction="none")
                    return (1 - alpha) * hard + alpha * temperature**2 * compared
                case({"loss": "distillation", "divergence": divergence, "temperature": temperature, "alpha": alpha},
                     soft_cap, loss)

    golden = {"torch": torch.__version__, "rows": ROWS, "vocabulary": VOCABULARY, "targets": targets.tolist(),
              "weights": weights.tolist(), "logits": logits.flatten().tolist(), "teacher": teacher.flatten().tolist(),
              "cases": cases}
    path = Path(__file__).parent.parent / "golden" / "losses.json"
    path.write_text(json.dumps(golden) + "\n")
    print(path, len(cases), "cases")


main()
