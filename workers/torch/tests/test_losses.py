"""Losses of targets are those that the native kernels are held to."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from pipeline_torch_worker.losses import CrossEntropy, Distillation
from support import GOLDEN

_GOLDEN: dict[str, Any] = json.loads((GOLDEN / "losses.json").read_text())


@pytest.mark.parametrize("case", _GOLDEN["cases"], ids=lambda case: f"{case['loss']}-{case.get('divergence')}")
def test_losses_and_gradients_are_those_of_the_table(case: dict[str, Any]) -> None:
    def table(name: str) -> torch.Tensor:
        return torch.tensor(_GOLDEN[name]).view(_GOLDEN["rows"], _GOLDEN["vocabulary"])

    targets, weights = torch.tensor(_GOLDEN["targets"]), torch.tensor(_GOLDEN["weights"])
    logits = table("logits").requires_grad_()
    capped = logits if case["soft_cap"] is None else torch.tanh(logits / case["soft_cap"]) * case["soft_cap"]
    if case["loss"] == "cross_entropy":
        losses = CrossEntropy(case["label_smoothing"])(capped, targets)
    else:
        loss = Distillation(case["temperature"], case["alpha"], case["divergence"])
        losses = loss(capped, table("teacher"), targets)
    total = (losses * weights).sum() / weights.sum()
    total.backward()
    assert losses.tolist() == pytest.approx(case["losses"], rel=3e-6, abs=3e-6)
    assert float(total) == pytest.approx(case["total"], rel=3e-6, abs=3e-6)
    assert logits.grad is not None
    assert logits.grad.flatten().tolist() == pytest.approx(case["gradient"], abs=2e-6)
