"""A run from its first step to its result: resuming, validation, number types, and what is refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pipeline_torch_worker.checkpoint import load
from pipeline_torch_worker.job import EarlyStopping, LossScaleSettings
from pipeline_torch_worker.precision import LossScaler
from pipeline_torch_worker.validation import Best, Course
from support import (
    GOLDEN,
    Ran,
    TokenRow,
    environment,
    golden_rows,
    run_here,
    train_job,
    worst,
    write_job,
    write_rows,
    write_steps,
)

LOSS_SCALE = {"init_scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


def here(root: Path, family: str = "llama31", variant: str = "attention", **changes: Any) -> Ran:
    root.mkdir(exist_ok=True)
    return run_here(root, train_job(root, family, variant, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": 0.2, "micro_batch_size": 2},
        {"optimizer": {"name": "sgd", "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.3, "nesterov": False}},
        {"optimizer": {"name": "lion", "betas": [0.9, 0.99], "weight_decay": 0.1}},
        {"optimizer": {"name": "muon", "weight_decay": 0.1, "adamw": {"weight_decay": 0.01}}},
        {"dtype": "f16", "loss_scale": {**LOSS_SCALE, "init_scale": 2.0**24, "growth_interval": 2}},
    ],
)
def test_a_run_is_resumed_exactly_from_every_step(tmp_path: Path, changes: dict[str, Any]) -> None:
    whole = here(tmp_path / "whole", **changes, save_every=1, keep_last=9).done()
    for step in (1, 4):
        saved = tmp_path / "whole" / "working" / f"step-{step}"
        resumed = here(tmp_path / f"from-{step}", **changes, resume=str(saved)).done()
        assert resumed.adapter_bytes == whole.adapter_bytes
        assert (resumed.output / "metrics.jsonl").read_text() == (whole.output / "metrics.jsonl").read_text()


def test_a_killed_process_goes_on_from_its_last_saved_step(tmp_path: Path) -> None:
    whole = here(tmp_path / "whole", save_every=1).done()
    folder = tmp_path / "killed"
    folder.mkdir()
    job = train_job(folder, "llama31", "attention", save_every=1)
    command = [sys.executable, "-m", "pipeline_torch_worker", str(write_job(folder, job))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment())
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line) == {"event": "checkpoint", "step": 2}:
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    steps = [int(path.name[5:]) for path in (folder / "working").glob("step-*")]
    resumed = run_here(folder, {**job, "resume": str(folder / "working" / f"step-{max(steps)}")}).done()
    assert resumed.adapter_bytes == whole.adapter_bytes


def test_cutting_a_step_into_micro_batches_changes_nothing(tmp_path: Path) -> None:
    one = here(tmp_path / "one", "llama2", "dropout").done()
    two = here(tmp_path / "two", "llama2", "dropout", micro_batch_size=2, activation_checkpointing=True).done()
    assert two.losses == pytest.approx(one.losses, rel=1e-6)
    assert worst(two.adapter, one.adapter) < 1e-5


@pytest.mark.parametrize("family", ["llama31", "mistral", "gemma2", "phi3_longrope"])
def test_a_packed_row_has_the_loss_of_its_documents_one_by_one(tmp_path: Path, family: str) -> None:
    packed, apart = tmp_path / "packed", tmp_path / "apart"
    rows = golden_rows(family, "attention")[:4]
    # Padding would be seen if it were computed: it is no token of the vocabulary.
    padded = [([*ids, 99_999], [*labels, 5], lengths) for ids, labels, lengths in rows]
    documents: list[TokenRow] = []
    for ids, labels, lengths in rows:
        ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
        documents += [(ids[a - n : a], labels[a - n : a], [n]) for a, n in zip(ends, lengths, strict=True)]
    runs = []
    for folder, data, is_packed in ((packed, padded, True), (apart, documents, False)):
        folder.mkdir()
        job = train_job(folder, family, "attention", micro_batch_size=3, total_steps=2)
        job["data"] = write_rows(folder / "data", data, packed=is_packed)
        half = len(data) // 2
        first_half = sum(len(lengths) for _, _, lengths in rows[:2]) if not is_packed else half
        plan = [list(range(first_half)), list(range(first_half, len(data)))]
        write_steps(folder / "steps.jsonl", [{"epoch": 1, "rows": rows, "learning_rate": 0.01} for rows in plan])
        runs.append(run_here(folder, job).done())
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-6)
    assert worst(runs[0].adapter, runs[1].adapter) < 1e-5
    for name in ("tokens", "target_tokens"):
        assert [record[name] for record in runs[0].records] == [record[name] for record in runs[1].records]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_narrow_number_types_train_to_about_the_same_losses(tmp_path: Path, dtype: str) -> None:
    exact = here(tmp_path / "f32").done()
    loss_scale = LOSS_SCALE if dtype == "f16" else None
    narrow = here(tmp_path / dtype, dtype=dtype, loss_scale=loss_scale).done()
    assert narrow.losses == pytest.approx(exact.losses, rel=5e-3)
    assert {tensor.dtype for tensor in narrow.adapter.values()} == {torch.float32}
    assert narrow.adapter_bytes != exact.adapter_bytes
    assert [record["loss_scale"] for record in narrow.records] == [loss_scale and 1024.0] * 6


def test_steps_that_overflow_are_skipped_and_hold_the_schedule(tmp_path: Path) -> None:
    loss_scale = {**LOSS_SCALE, "init_scale": 2.0**30, "backoff_factor": 2.0**-10}
    ran = here(tmp_path, dtype="f16", loss_scale=loss_scale).done()
    skipped = [record["skipped"] for record in ran.records]
    assert skipped[0]
    assert not all(skipped)
    assert ran.records[0]["grad_norm"] is None
    assert ran.records[1]["loss_scale"] == 2.0**20
    first_kept = skipped.index(False)
    assert [record["learning_rate"] for record in ran.records[: first_kept + 1]] == [0.0] * (first_kept + 1)
    assert json.loads((ran.output / "summary.json").read_text())["progress"]["skipped_steps"] == sum(skipped)


def test_a_run_whose_gradients_all_overflow_fails(tmp_path: Path) -> None:
    failed = here(tmp_path, dtype="f16", loss_scale={**LOSS_SCALE, "init_scale": 2.0**60}).failed
    assert failed["cause"] == "numeric"
    assert failed["messages"] == ["the gradients of every step overflowed: nothing was trained"]


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


def test_all_weights_are_trained_and_left_in_the_types_of_the_base(tmp_path: Path) -> None:
    ran = full_run(tmp_path)
    base = {path.name: load_file(path) for path in (GOLDEN / "llama_bf16_shards").glob("model-*.safetensors")}
    left = {path.name: load_file(path) for path in (ran.output / "model").glob("*.safetensors")}
    assert left.keys() == base.keys()
    assert len(left) == 4
    for file, tensors in base.items():
        assert left[file].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert left[file][name].dtype == tensor.dtype
            assert not torch.equal(left[file][name], tensor), name
    model = AutoModelForCausalLM.from_pretrained(ran.output / "model", dtype="auto")
    assert all(torch.equal(model.state_dict()[name], tensor) for file in left.values() for name, tensor in file.items())


def full_run(root: Path) -> Ran:
    rows = [([5, 9, 2, 7, 30, 41], [-100, 9, 2, 7, 30, 41], [6]), ([3, 3, 8, 60], [3, 3, 8, 60], [4])]
    job = train_job(root, "llama31", "attention", method="full", adapter=None, total_steps=3)
    job["model"] = str(GOLDEN / "llama_bf16_shards")
    job["data"] = write_rows(root / "data", rows)
    # Every tensor has to be reached: an embedding's decay moves rows that no token takes.
    write_steps(root / "steps.jsonl", [{"epoch": step, "rows": [0, 1], "learning_rate": 0.01} for step in (1, 2, 3)])
    return run_here(root, job).done()


def test_training_all_weights_is_what_torch_makes_of_it(tmp_path: Path) -> None:
    rows = golden_rows("llama2", "attention")
    job = train_job(tmp_path, "llama2", "attention", method="full", adapter=None, clip_grad_norm=None, total_steps=2)
    plan = [{"epoch": 1, "rows": [0, 1], "learning_rate": 1e-3}, {"epoch": 1, "rows": [2, 3], "learning_rate": 5e-4}]
    write_steps(tmp_path / "steps.jsonl", plan)
    ran = run_here(tmp_path, job).done()

    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "llama2", dtype=torch.float32, attn_implementation="eager")
    settings = {name: value for name, value in job["optimizer"].items() if name != "name"}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    losses = []
    for step in plan:
        total, targets = torch.zeros(()), 0
        for number in step["rows"]:  # type: ignore[attr-defined]
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
        optimizer.param_groups[0]["lr"] = step["learning_rate"]
        optimizer.step()
        losses.append(float(total.detach()) / targets)
    assert ran.losses == pytest.approx(losses, rel=1e-5)
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert worst(load_file(ran.output / "model" / "model.safetensors"), expected) < 1e-4


def validated(root: Path, **changes: Any) -> Ran:
    root.mkdir(exist_ok=True)
    validation = write_rows(root / "validation", golden_rows("llama31", "all_linear")[:3])
    return here(root, validation=validation, eval_steps=1, **changes)


def test_validation_looks_before_the_first_step_and_keeps_the_best(tmp_path: Path) -> None:
    ran = validated(tmp_path, keep_best=True, save_every=1, keep_last=9).done()
    looks = [record for record in ran.records if record["kind"] == "validation"]
    assert [record["step"] for record in looks] == list(range(7))
    assert (looks[0]["epoch"], looks[0]["best"]) == (0, False)
    assert list(looks[0]) == ["kind", "step", "epoch", "loss", "rows", "target_tokens", "best"]
    best = min(looks[1:], key=lambda record: record["loss"])
    assert [record["best"] for record in looks if record["step"] == best["step"]] == [True]
    values = load(tmp_path / "working" / f"step-{best['step']}").trained.values
    assert worst(ran.adapter, values) == 0.0
    # What it does without, for comparison: the last step's.
    assert best["step"] != 6


def test_training_ends_early_without_improvement(tmp_path: Path) -> None:
    ran = validated(tmp_path, early_stopping={"patience": 1, "min_delta": 10.0}).done()
    # The first look after a step is an improvement on nothing.
    assert [record["step"] for record in ran.records if record["kind"] == "train"] == [1, 2]
    progress = json.loads((ran.output / "summary.json").read_text())["progress"]
    assert (progress["step"], progress["total_steps"]) == (2, 6)


def test_the_course_of_validation_is_the_native_workers() -> None:
    stopping, course, ends = EarlyStopping(patience=2, min_delta=0.1), Course(), []
    # The third is lower than the second, and not by enough.
    for step, loss in [(0, 0.1), (5, 3.0), (10, 2.5), (15, 2.45), (20, 2.3), (25, 2.4), (30, 2.3)]:
        course.add(step, loss, stopping)
        ends.append(course.ends_early(stopping))
    assert ends == [False, False, False, False, False, False, True]
    assert course.best == Best(20, 2.3)
    assert not course.ends_early(None)


def test_a_tensor_that_no_gradient_moves_ends_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    job = train_job(tmp_path, "llama31", "attention")
    tensors = load_file(folder / "adapter_model.safetensors")
    # With B and A of zeros neither gets a gradient; decay moves nothing of them either.
    tensors = {name: torch.zeros_like(tensor) if "layers.1" in name else tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    failed = run_here(tmp_path, job).failed
    assert failed["cause"] == "numeric"
    assert "no gradient has moved `base_model.model.model.layers.1." in failed["messages"][0]


def test_a_loss_that_is_not_finite_names_step_and_rows(tmp_path: Path) -> None:
    job = train_job(tmp_path, "llama31", "attention", micro_batch_size=2)
    folder = tmp_path / "adapter"
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({name: tensor * float("inf") for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    failed = run_here(tmp_path, job).failed
    assert failed["cause"] == "numeric"
    assert failed["messages"][0] == "the loss is nan in step 1"
    assert "nothing has been trained yet" in failed["help"]
    assert "its rows of the data: 0, 1" in failed["help"]


def test_rows_without_any_target_are_said(tmp_path: Path) -> None:
    job = train_job(tmp_path, "llama31", "attention")
    rows = [(ids, [-100] * len(ids), lengths) for ids, _, lengths in golden_rows("llama31", "attention")]
    job["data"] = write_rows(tmp_path / "data", rows)
    ran = run_here(tmp_path, job)
    assert ran.failed["cause"] == "bad_data"
    assert ran.failed["messages"] == ["no row has a target token: nothing was trained"]
    assert ran.of("warning")[0]["message"] == "step 1 has no target token and changes nothing"


def test_metrics_and_events_have_the_native_workers_fields(tmp_path: Path) -> None:
    ran = here(tmp_path, save_every=2).done()
    fields = ["kind", "step", "epoch", "loss", "learning_rate", "grad_norm", "rows", "tokens", "target_tokens"]
    assert list(ran.records[0]) == [*fields, "loss_scale", "skipped"]
    assert [event["step"] for event in ran.of("checkpoint")] == [2, 4, 6]
    told = ran.of("metrics")[0]["values"]
    assert told["peak_memory_bytes"] > 50 << 20
    assert {name: told[name] for name in ran.records[0]} == ran.records[0]
    assert ran.of("progress")[0]["note"].startswith("1|1|Loss: 6.4865 lr: 0.00e+00 grad_norm: 0.987 · ")
    names = sorted(path.name for path in (ran.output / "adapter").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
