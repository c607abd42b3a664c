"""The worker's training runs are those of PEFT, for every family and kind of adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from support import GOLDEN, golden_cases, golden_steps, run_here, train_job, worst


@pytest.mark.parametrize(("family", "variant"), golden_cases())
def test_losses_gradient_norms_and_the_adapter_are_those_of_peft(tmp_path: Path, family: str, variant: str) -> None:
    ran = run_here(tmp_path, train_job(tmp_path, family, variant)).done()
    expected = golden_steps(family, variant)["steps"]
    assert ran.losses == pytest.approx([step["loss"] for step in expected], rel=1e-5)
    norms = [record["grad_norm"] for record in ran.records]
    assert norms == pytest.approx([step["grad_norm"] for step in expected], rel=1e-4)
    assert [record["target_tokens"] for record in ran.records] == [step["target_tokens"] for step in expected]
    file = load_file(GOLDEN / family / "lora" / variant / "adapter" / "adapter_model.safetensors")
    # PEFT puts the base's own weight beside an adapter on a head.
    adapter = {name: tensor for name, tensor in file.items() if ".base_layer." not in name}
    assert worst(ran.adapter, adapter) < 1e-4
