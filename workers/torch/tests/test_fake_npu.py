"""The worker's path for an NPU, on the emulated one of `fake_npu.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import processes
from support import GOLDEN, Ran, Script, golden_script, infer_job, run_here, train_job, worst

NPU = {"PIPELINE_TORCH_WORKER_NPU_MODULE": "fake_npu"}


def on_both(root: Path, ranks: int, variant: str = "attention", **changes: Any) -> tuple[Ran, Ran]:
    """A golden run on the CPU, and the same on so many NPUs."""
    cpu, npu = root / "cpu", root / "npu"
    job = train_job(cpu, "llama31", variant, **changes)
    expected = run_here(cpu, job, golden_script("llama31", variant, cpu)).done()
    job = train_job(npu, "llama31", variant, **changes, device="npu")
    script = golden_script("llama31", variant, npu, ranks)
    return expected, processes.run_ranks(npu, job, ranks, script, **NPU).done()


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_on_an_npu_is_that_on_the_processor(tmp_path: Path, ranks: int) -> None:
    cpu, npu = on_both(tmp_path, ranks, "dora", dropout=0.1, activation_checkpointing=True)
    assert npu.losses == pytest.approx(cpu.losses, rel=1e-6)
    assert worst(npu.trained, cpu.trained) < 1e-4
    assert (npu.how["device"], npu.how["device_name"], npu.how["ranks"]) == ("npu", "Fake910B", ranks)
    # By the device's own counter.
    peaks = [step["peak_memory_bytes"] for step in npu.steps]
    assert peaks == [[(123 + rank) << 20 for rank in range(ranks)]] * 6


def test_rows_are_scored_and_prompts_completed_on_an_npu(tmp_path: Path) -> None:
    expected = load_file(GOLDEN / "gemma2" / "expected.safetensors")
    prompt, ids = expected["greedy_prompt"][0].tolist(), expected["input_ids"][0].tolist()
    script = Script(2).generate([{"input_ids": prompt, "seed": 0}, {"input_ids": prompt[:5], "seed": 0}])
    script.score([(ids, ids, [len(ids)])])
    job = infer_job("gemma2", device="npu")
    completions, ((_, loss, _, _),) = processes.run_ranks(tmp_path, job, 2, script.close(), **NPU).done().results
    assert completions[0]["output_ids"] == expected["greedy_ids"][0].tolist()[len(prompt) :]
    nll = torch.nn.functional.cross_entropy(expected["logits"][0, :-1], expected["input_ids"][0, 1:], reduction="sum")
    assert loss == pytest.approx(float(nll), rel=1e-5)


def test_bf16_goes_through_the_fused_attention(tmp_path: Path) -> None:
    cpu, npu = on_both(tmp_path, 1, dtype="bf16")
    assert npu.how["attention"] == "npu"
    assert npu.losses == pytest.approx(cpu.losses, rel=5e-3)


def test_a_missing_torch_npu_is_said_with_what_to_do(tmp_path: Path) -> None:
    failed = run_here(tmp_path, train_job(tmp_path, "llama31", "attention", device="npu")).failed
    assert failed["cause"] == "machine"
    assert "torch_npu cannot be imported" in failed["messages"][0]
    assert "CANN" in failed["help"]
