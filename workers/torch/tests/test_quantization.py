"""What the worker computes on a base in 4 bits is what the reference computes on its dequantised weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pipeline_torch_worker import adapter
from pipeline_torch_worker.failure import JobFailure
from pipeline_torch_worker.job import QuantizeSettings
from pipeline_torch_worker.model import load, read_config
from pipeline_torch_worker.products import fuse
from support import (
    GOLDEN,
    Script,
    adapter_folder,
    golden_rows,
    golden_script,
    golden_steps,
    infer_job,
    run_here,
    train_job,
    worst,
)

functional = pytest.importorskip("bitsandbytes.functional")

NF4 = GOLDEN / "nf4"


def cases() -> list[tuple[str, str]]:
    return sorted((path.parents[2].name, path.parent.name) for path in NF4.glob("*/lora/*/steps.json"))


def quantize(**changes: Any) -> dict[str, Any]:
    return {"base": "nf4", "double_quantization": True, "block_size": 64, "skip_modules": ["lm_head"], **changes}


@pytest.mark.parametrize(("family", "variant"), cases())
def test_training_is_that_on_the_dequantised_weights(tmp_path: Path, family: str, variant: str) -> None:
    named = f"nf4/{family}"
    steps = golden_steps(named, variant)
    settings = quantize(double_quantization=steps["nf4"]["double_quantisation"])
    job = train_job(tmp_path, named, variant, model=str(GOLDEN / family), quantize=settings)
    ran = run_here(tmp_path, job, golden_script(named, variant, tmp_path)).done()
    assert ran.losses == pytest.approx([step["loss"] for step in steps["steps"]], rel=1e-5)
    norms = [step["grad_norm"] for step in ran.steps]
    assert norms == pytest.approx([step["grad_norm"] for step in steps["steps"]], rel=1e-4)
    file = load_file(NF4 / family / "lora" / variant / "adapter" / "adapter_model.safetensors")
    assert worst(ran.trained, file) < 1e-4


def settings(**changes: Any) -> QuantizeSettings:
    return QuantizeSettings(**quantize(**changes))


def loaded(folder: Path, quantized: QuantizeSettings, dtype: torch.dtype = torch.float32) -> Any:
    return load(folder, read_config(folder), dtype, None, quantized, torch.device("cpu"))


@pytest.mark.parametrize("family", ["llama31", "qwen2"])
@pytest.mark.parametrize("double", [True, False])
@torch.no_grad()
def test_logits_are_those_of_the_dequantised_weights(family: str, double: bool) -> None:
    expected = load_file(NF4 / family / "expected.safetensors")
    model = loaded(GOLDEN / family, settings(double_quantization=double))
    logits = model(input_ids=expected["input_ids"]).logits
    assert float((logits - expected["logits_nested" if double else "logits_single"]).abs().max()) < 1e-5


@torch.no_grad()
def test_a_weight_is_widened_to_the_dtype_of_its_file(tmp_path: Path) -> None:
    """bitsandbytes' own layer would widen to what is computed in."""
    shutil.copytree(GOLDEN / "qwen2", tmp_path / "qwen2")
    for path in (tmp_path / "qwen2").glob("*.safetensors"):
        save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    expected = load_file(NF4 / "qwen2-bnb4-bf16" / "expected.safetensors")
    model = loaded(tmp_path / "qwen2", settings(double_quantization=False))
    assert float((model(input_ids=expected["input_ids"]).logits - expected["logits"]).abs().max()) < 1e-5


@pytest.mark.parametrize("name", ["llama31-bnb4", "qwen2-bnb4-bf16"])
@torch.no_grad()
def test_a_checkpoint_that_is_stored_in_4_bits_computes_what_it_stands_for(name: str) -> None:
    expected = load_file(NF4 / name / "expected.safetensors")
    folder = NF4 / name
    model = load(folder, read_config(folder), torch.float32, None, None, torch.device("cpu"))
    assert float((model(input_ids=expected["input_ids"]).logits - expected["logits"]).abs().max()) < 1e-5
    with pytest.raises(JobFailure, match="stored in 4 bits already"):
        loaded(folder, settings())


def test_layers_that_are_skipped_stay_as_they_are() -> None:
    model = loaded(GOLDEN / "llama31", settings(skip_modules=["lm_head", "o_proj", "layers.0"]), torch.bfloat16)
    kinds = {path: module.weight.dtype for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for path, dtype in kinds.items():
        whole = path == "lm_head" or "o_proj" in path or "layers.0." in path
        assert dtype == (torch.bfloat16 if whole else torch.uint8), path
    assert {torch.bfloat16, torch.uint8} == set(kinds.values())
    with pytest.raises(JobFailure, match="no linear layer"):
        loaded(GOLDEN / "llama31", settings(skip_modules=["model", "lm_head"]))
    with pytest.raises(JobFailure, match="in blocks of 48"):
        loaded(GOLDEN / "llama31", settings(block_size=48))


def test_an_adapter_is_asked_on_the_base_that_it_was_trained_on(tmp_path: Path) -> None:
    """The loss before the first step, of rows that are scored."""
    family, variant = "llama31", "attention"
    folder = adapter_folder(f"nf4/{family}", variant, tmp_path / "adapter")
    rows = golden_rows(f"nf4/{family}", variant)[:2]
    job = infer_job(family, adapter=str(folder), quantize=quantize())
    (answer,) = run_here(tmp_path, job, Script().score(rows).close()).done().answers
    scores = answer["ranks"][0]
    loss = sum(nll for _, nll, _, _ in scores) / sum(targets for _, _, targets, _ in scores)
    assert loss == pytest.approx(golden_steps(f"nf4/{family}", variant)["steps"][0]["loss"], rel=1e-5)


def test_adapters_on_layers_in_4_bits_are_one_operation(tmp_path: Path) -> None:
    model = loaded(GOLDEN / "llama31", settings())
    adapted = adapter.attach(model, adapter_folder("nf4/llama31", "attention", tmp_path / "adapter"), trained=True)
    layers = [layer for _, layer in adapter.lora_layers(adapted)]
    assert layers
    assert all(fuse(layer) for layer in layers)


def matrices() -> list[str]:
    with safe_open(NF4 / "matrices.safetensors", framework="pt") as file:
        return sorted(name.removesuffix(".source") for name in file.keys() if name.endswith(".source"))  # noqa: SIM118


@pytest.mark.parametrize("name", matrices())
def test_stored_and_widened_values_are_those_of_the_reference(name: str) -> None:
    cases = load_file(NF4 / "matrices.safetensors")
    from pipeline_torch_worker import quantization

    quantization._mend_the_cpu()
    source = cases[f"{name}.source"]
    packed, state = functional.quantize_4bit(source, quant_type="nf4")
    assert torch.equal(packed.flatten(), cases[f"{name}.packed"])
    assert torch.equal(functional.dequantize_4bit(packed, state), cases[f"{name}.dequantised"])
    if f"{name}.nested.absmax" in cases:
        _, state = functional.quantize_4bit(source, quant_type="nf4", compress_statistics=True)
        assert torch.equal(state.absmax, cases[f"{name}.nested.absmax"])
        assert torch.equal(state.state2.absmax, cases[f"{name}.nested.nested_absmax"])
