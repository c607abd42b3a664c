"""Training as requests direct it: states that come back, number types, and what ends a run."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pipeline_torch_worker.job import LossScaleSettings
from pipeline_torch_worker.precision import LossScaler
from support import (
    GOLDEN,
    Ran,
    Script,
    Step,
    TokenRow,
    golden_plan,
    golden_rows,
    golden_script,
    run_here,
    takes_minutes,
    train_job,
    worst,
)

LOSS_SCALE = {"init_scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


def here(root: Path, family: str = "llama31", variant: str = "attention", at_once: int = 1, **changes: Any) -> Ran:
    script = golden_script(family, variant, root, at_once=at_once)
    return run_here(root, train_job(root, family, variant, **changes), script)


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": 0.2},
        {"optimizer": {"name": "sgd", "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.3, "nesterov": False}},
        {"optimizer": {"name": "lion", "betas": [0.9, 0.99], "weight_decay": 0.1}},
        {"optimizer": {"name": "muon", "weight_decay": 0.1, "adamw": {"weight_decay": 0.01}}},
        {"dtype": "f16", "loss_scale": {**LOSS_SCALE, "growth_interval": 2}},
    ],
)
def test_a_run_is_resumed_exactly_from_every_step(tmp_path: Path, changes: dict[str, Any]) -> None:
    data, plan = golden_rows("llama31", "attention"), golden_plan("llama31", "attention")
    whole = tmp_path / "whole"
    script = Script()
    for number, step in enumerate(plan, 1):
        script.step(data, step).save(whole / f"step-{number}", state=True)
    job = train_job(whole, "llama31", "attention", **changes)
    expected = run_here(whole, job, script.save(whole / "output" / "saved").close()).done()
    for done in (1, 4):
        folder = tmp_path / f"from-{done}"
        script = Script().restore(whole / f"step-{done}", done, expected.steps[done - 1]["loss_scaler"])
        script = script.steps(data, plan[done:]).save(folder / "output" / "saved")
        resumed = run_here(folder, train_job(folder, "llama31", "attention", **changes), script.close()).done()
        assert resumed.trained.keys() == expected.trained.keys()
        assert all(torch.equal(resumed.trained[name], value) for name, value in expected.trained.items())
        assert resumed.losses == expected.losses[done:]


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    other = here(tmp_path / "other", variant="all_linear").done()
    script = Script().restore(other.output / "saved", 0).close()
    failed = run_here(tmp_path, train_job(tmp_path, "llama31", "attention"), script).failed
    assert "the saved state and the model differ in `" in failed["messages"][0]


def test_cutting_a_step_into_micro_batches_changes_nothing(tmp_path: Path) -> None:
    one = here(tmp_path / "one", "llama2", "dropout").done()
    two = here(tmp_path / "two", "llama2", "dropout", at_once=2, activation_checkpointing=True).done()
    assert two.losses == pytest.approx(one.losses, rel=1e-6)
    assert worst(two.trained, one.trained) < 1e-5


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=takes_minutes)])
def test_compiled_layers_train_to_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    plain = here(tmp_path / "plain", "llama2", "dropout", at_once=2).done()
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    changes = {"compile": "layers", "activation_checkpointing": True}
    ran = here(tmp_path / "compiled", "llama2", "dropout", at_once=2, **changes).done()
    assert graphs["unique_graphs"] > before
    assert ran.losses == pytest.approx(plain.losses, rel=1e-5)
    assert worst(ran.trained, plain.trained) < 1e-4


def test_layers_that_torch_cannot_compile_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    failed = here(tmp_path, "llama2", "attention", compile="layers").failed
    assert (failed["cause"], failed["help"]) == ("machine", "leave `compile` out")
    assert "cannot compile the model's layers" in failed["messages"][0]
    assert "no-such-compiler" in failed["messages"][1]


@pytest.mark.parametrize("family", ["llama31", "mistral", "gemma2", "phi3_longrope"])
def test_a_packed_row_has_the_loss_of_its_documents_one_by_one(tmp_path: Path, family: str) -> None:
    rows = golden_rows(family, "attention")[:4]
    documents: list[TokenRow] = []
    for ids, labels, lengths in rows:
        ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
        documents += [(ids[a - n : a], labels[a - n : a], [n]) for a, n in zip(ends, lengths, strict=True)]
    first = sum(len(lengths) for _, _, lengths in rows[:2])
    runs = []
    for name, data, half in (("packed", rows, 2), ("apart", documents, first)):
        plan = [Step(list(range(half)), 0.01), Step(list(range(half, len(data))), 0.01)]
        script = Script().steps(data, plan, at_once=3).save(tmp_path / name / "output" / "saved")
        runs.append(run_here(tmp_path / name, train_job(tmp_path / name, family, "attention"), script.close()).done())
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-6)
    assert worst(runs[0].trained, runs[1].trained) < 1e-5


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_narrow_number_types_train_to_about_the_same_losses(tmp_path: Path, dtype: str) -> None:
    exact = here(tmp_path / "f32").done()
    loss_scale = LOSS_SCALE if dtype == "f16" else None
    narrow = here(tmp_path / dtype, dtype=dtype, loss_scale=loss_scale).done()
    assert narrow.losses == pytest.approx(exact.losses, rel=5e-3)
    assert {tensor.dtype for tensor in narrow.trained.values()} == {torch.float32}
    assert worst(narrow.trained, exact.trained) > 0
    assert [step["loss_scale"] for step in narrow.steps] == [loss_scale and 1024.0] * 6


def test_steps_that_overflow_change_nothing_but_the_loss_scale(tmp_path: Path) -> None:
    loss_scale = {**LOSS_SCALE, "init_scale": 2.0**30, "backoff_factor": 2.0**-10}
    ran = here(tmp_path, dtype="f16", loss_scale=loss_scale).done()
    skipped = [step["grad_norm"] is None for step in ran.steps]
    assert skipped[0]
    assert not all(skipped)
    assert ran.steps[1]["loss_scale"] == 2.0**20
    assert ran.steps[0]["loss_scaler"] == {"scale": 2.0**20, "growth_tracker": 0, "skipped": 1, "skipped_at_min": 0}


def test_the_factor_on_the_loss_follows_torchs_grad_scaler() -> None:
    cases = json.loads((GOLDEN / "optimizers.json").read_text())["grad_scaler"]
    assert len(cases) >= 3
    for case in cases:
        scaler = LossScaler(LossScaleSettings(**case["settings"]))
        for step, overflow in enumerate(case["overflows"]):
            if overflow:
                scaler.after_overflow()
            else:
                scaler.after_step()
            assert scaler.scale == case["scale"][step]
            assert scaler.state.growth_tracker == case["growth_tracker"][step]


def test_training_all_weights_is_what_torch_makes_of_it(tmp_path: Path) -> None:
    rows = golden_rows("llama2", "attention")
    job = train_job(tmp_path, "llama2", "attention", method="full", adapter=None, clip_grad_norm=None)
    plan = [Step([0, 1], 1e-3), Step([2, 3], 5e-4)]
    ran = run_here(tmp_path, job, Script().steps(rows, plan).save(tmp_path / "output" / "saved").close()).done()

    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "llama2", dtype=torch.float32, attn_implementation="eager")
    settings = {name: value for name, value in job["optimizer"].items() if name != "name"}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    losses = []
    for step in plan:
        total, targets = torch.zeros(()), 0
        for number in step.rows:
            ids, labels, lengths = rows[number]
            start = 0
            for length in lengths:
                piece = slice(start, start + length)
                logits = model(torch.tensor([ids[piece]])).logits[0, :-1]
                wanted = torch.tensor(labels[piece])[1:]
                total = total + torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
                targets += int((wanted != -100).sum())
                start += length
        optimizer.zero_grad()
        (total / targets).backward()
        optimizer.param_groups[0]["lr"] = step.rate
        optimizer.step()
        losses.append(float(total.detach()) / targets)
    assert ran.losses == pytest.approx(losses, rel=1e-5)
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert worst(ran.trained, expected) < 1e-4


def test_a_tensor_that_no_gradient_moves_ends_the_run(tmp_path: Path) -> None:
    job = train_job(tmp_path, "llama31", "attention")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    # With B and A of zeros neither gets a gradient; decay moves nothing of them either.
    tensors = {name: torch.zeros_like(tensor) if "layers.1" in name else tensor for name, tensor in tensors.items()}
    save_file(tensors, path)
    answers = run_here(tmp_path, job, golden_script("llama31", "attention", tmp_path)).done().answers
    stopped = next(answer["stopped"] for answer in answers if "stopped" in answer)
    assert (stopped["why"], stopped["steps"]) == ("not_moved", 3)
    assert stopped["tensor"].startswith("base_model.model.model.layers.1.")


def test_a_loss_that_is_not_finite_names_step_and_rows(tmp_path: Path) -> None:
    job = train_job(tmp_path, "llama31", "attention")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: tensor * float("inf") for name, tensor in load_file(path).items()}, path)
    answer = run_here(tmp_path, job, golden_script("llama31", "attention", tmp_path, at_once=2)).done().answers[0]
    expected = {"loss": "nan", "guilty": [0, 1], "rows": [0, 1], "largest_gradient": None}
    assert answer == {"stopped": {"why": "loss_not_finite", **expected}}


def test_a_frozen_weight_that_changed_is_named() -> None:
    from pipeline_torch_worker.audit import Audit
    from pipeline_torch_worker.device import Device
    from pipeline_torch_worker.parallel import Ranks

    frozen = {dtype: torch.ones(8, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.uint8)}
    named = {str(dtype): tensor for dtype, tensor in frozen.items()}
    audit = Audit({}, named, True, Ranks.alone(Device("cpu", torch.device("cpu"), "cpu")))
    for name, tensor in named.items():
        assert audit.check_frozen() is None
        tensor[3] += 1
        assert audit.check_frozen() == name
        tensor[3] -= 1


def test_steps_without_a_loss_may_move_nothing() -> None:
    from pipeline_torch_worker.audit import STEPS, Audit
    from pipeline_torch_worker.device import Device
    from pipeline_torch_worker.parallel import Ranks

    audit = Audit(
        {"lora_A": torch.nn.Parameter(torch.ones(8))}, {}, True, Ranks.alone(Device("cpu", torch.device("cpu"), "cpu"))
    )
    assert [audit.after_step(1e-3, 0.0) for _ in range(2 * STEPS)] == [None] * (2 * STEPS)
    assert [audit.after_step(1e-3, 0.5) for _ in range(STEPS)] == [None] * (STEPS - 1) + ["lora_A"]
