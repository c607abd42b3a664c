"""The worker's training runs are those of PEFT, for every family and kind of adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from support import (
    GOLDEN,
    Script,
    Step,
    golden_cases,
    golden_rows,
    golden_script,
    golden_steps,
    run_here,
    train_job,
    worst,
)


@pytest.mark.parametrize(("family", "variant"), golden_cases())
def test_losses_gradient_norms_and_the_adapter_are_those_of_peft(tmp_path: Path, family: str, variant: str) -> None:
    job = train_job(tmp_path, family, variant)
    ran = run_here(tmp_path, job, golden_script(family, variant, tmp_path)).done()
    expected = golden_steps(family, variant)["steps"]
    assert ran.losses == pytest.approx([step["loss"] for step in expected], rel=1e-5)
    norms = [step["grad_norm"] for step in ran.steps]
    assert norms == pytest.approx([step["grad_norm"] for step in expected], rel=1e-4)
    file = load_file(GOLDEN / family / "lora" / variant / "adapter" / "adapter_model.safetensors")
    # PEFT puts the base's own weight beside an adapter on a head.
    adapter = {name: tensor for name, tensor in file.items() if ".base_layer." not in name}
    assert worst(ran.trained, adapter) < 1e-4


@pytest.mark.parametrize(("family", "variant"), golden_cases())
def test_gradients_are_those_of_peft(tmp_path: Path, family: str, variant: str) -> None:
    """Plain gradient descent at a rate of one moves each value by its gradient."""
    sgd = {"name": "sgd", "weight_decay": 0.0}
    job = train_job(tmp_path, family, variant, optimizer=sgd, clip_grad_norm=None, activation_checkpointing=True)
    script = Script().step(golden_rows(family, variant), Step([0, 1], 1.0)).save(tmp_path / "output" / "saved")
    ran = run_here(tmp_path, job, script.close()).done()
    before = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    found = {name: before[name].double() - value.double() for name, value in ran.trained.items()}
    expected = load_file(GOLDEN / family / "lora" / variant / "grads_step0.safetensors")
    # A step's rounding is that of the value, which may be far greater than its gradient.
    slack = max(float(before[name].abs().max()) for name in expected) * 1e-6
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) < 1e-4 * float(gradient.abs().max()) + slack, name
