"""Losses of targets, from logits: those of `model/src/loss/`, on tensors that torch differentiates."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from .job import DivergenceKind


@dataclass(frozen=True)
class CrossEntropy:
    """The negative log-likelihood, some of which is spread evenly over the vocabulary."""

    label_smoothing: float = 0.0

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """`[targets]`, in nats, of `[targets, vocabulary]`."""
        return F.cross_entropy(logits, targets, reduction="none", label_smoothing=self.label_smoothing)


@dataclass(frozen=True)
class Distillation:
    """`(1 - alpha) · cross-entropy + alpha · temperature² · divergence(teacher, student)` of softmax(logits / temperature)."""

    temperature: float
    alpha: float
    divergence: DivergenceKind

    def __call__(self, logits: torch.Tensor, teacher: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """`[targets]`, in nats; `teacher` has the shape of `logits`."""
        log_p = F.log_softmax(teacher / self.temperature, dim=-1)
        log_q = F.log_softmax(logits / self.temperature, dim=-1)
        if self.divergence == "forward_kl":
            compared = log_p.exp() * (log_p - log_q)
        elif self.divergence == "reverse_kl":
            compared = log_q.exp() * (log_q - log_p)
        else:
            log_m = torch.logaddexp(log_p, log_q) - math.log(2)
            compared = (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)) / 2
        nll = F.cross_entropy(logits, targets, reduction="none")
        return (1 - self.alpha) * nll + self.alpha * self.temperature**2 * compared.sum(dim=-1)
