"""The optimizers step as their golden cases, which the native backend is compared with, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline_torch_worker.checkpoint import SavedTensors
from pipeline_torch_worker.device import Device
from pipeline_torch_worker.job import _read_optimizer
from pipeline_torch_worker.optimizer import Optimizer
from pipeline_torch_worker.parallel import Ranks
from support import GOLDEN

CASES = [
    pytest.param(case, id=f"{path.stem}: {case['name']}")
    for path in sorted((GOLDEN / "optimizers").glob("*.json"))
    for case in json.loads(path.read_text())["cases"]
]


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a share of the largest element."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_the_reference_also_after_a_restart(case: dict[str, Any], tmp_path: Path) -> None:
    problems: list[str] = []
    settings = _read_optimizer(case["optimizer"], "optimizer", problems)
    assert not problems and not settings.problems()
    name, shape = case["tensor"]["name"], case["tensor"]["shape"]

    def started(values: torch.Tensor) -> tuple[torch.nn.Parameter, Optimizer]:
        parameter = torch.nn.Parameter(values.clone())
        return parameter, Optimizer(settings, {name: parameter})

    before = torch.tensor(case["start"]).reshape(shape)
    expected_before = before
    parameter, optimizer = started(before)
    for step, (gradient, rate) in enumerate(zip(case["gradients"], case["learning_rates"], strict=True)):
        parameter.grad = torch.tensor(gradient).reshape(shape)
        optimizer.step(rate)
        found, expected = parameter.detach().clone(), torch.tensor(case["values"][step]).reshape(shape)
        if case.get("compare") == "updates":
            assert apart(found - before, expected - expected_before) <= case["tolerance"]
        else:
            assert apart(found, expected) <= case["tolerance"]
        files = optimizer.save(tmp_path, True, Ranks.alone(Device("cpu", torch.device("cpu"), "cpu")))
        saved = {file.removesuffix(".safetensors"): load_file(tmp_path / file) for file in files}
        assert {set_ for set_, tensors in saved.items() if tensors} == {"trainable", *case["state"]}
        for state, values in case["state"].items():
            limit = case.get("state_tolerance", case["tolerance"])
            assert apart(saved[state][name], torch.tensor(values[step]).reshape(shape)) <= limit
        before, expected_before = found, expected
        parameter, optimizer = started(found)
        with SavedTensors({set_: [str(tmp_path / f"{set_}.safetensors")] for set_ in saved}) as tensors:
            optimizer.restore(step + 1, tensors)
