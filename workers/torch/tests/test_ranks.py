"""Several ranks: the same run as one, whatever their share; and what becomes of a run whose ranks fail, hang or are left alone."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import processes
from support import Script, Step, golden_rows, golden_script, run_here, takes_minutes, train_job, worst


def same_run(root: Path, ranks: int, family: str, variant: str, **changes: Any) -> tuple[float, float]:
    """The greatest differences of losses and of what is trained between one rank and several."""
    runs = []
    data = golden_rows(family, variant)
    # Steps of three rows: shares of two ranks are not alike.
    plan = [Step(list(range(first, first + 3)), 0.002) for first in range(0, len(data) - 2, 3)]
    for name, count in (("one", 1), ("several", ranks)):
        folder = root / name
        job = train_job(folder, family, variant, **changes)
        script = Script(count).steps(data, plan).rows("score", dict(enumerate(data[:ranks]))).request("check_frozen")
        requests = script.save(folder / "output" / "saved").close()
        ran = run_here(folder, job, requests) if count == 1 else processes.run_ranks(folder, job, count, requests)
        runs.append(ran.done())
    one, several = runs
    assert one.how["compiled"] == several.how["compiled"] == (changes.get("compile") == "layers")
    (score,), scores = (next(answer for answer in run.answers if isinstance(answer, list)) for run in runs)
    assert sum(scores) == pytest.approx(score, rel=1e-4)
    losses = max(abs(a / b - 1) for a, b in zip(several.losses, one.losses, strict=True))
    return losses, worst(several.trained, one.trained)


@pytest.mark.parametrize("variant", ["attention", "dropout"])
def test_three_ranks_make_the_run_of_one(tmp_path: Path, variant: str) -> None:
    losses, adapter = same_run(tmp_path, 3, "llama2", variant)
    assert losses < 1e-6
    assert adapter < 1e-5


@pytest.mark.parametrize(
    ("family", "variant", "changes"),
    [
        ("llama31", "dora", {}),
        ("llama31", "trainable_tokens", {}),
        ("gemma2", "tied_trainable_tokens", {}),
        ("qwen2", "tied_lm_head_saved", {"activation_checkpointing": True}),
        ("phi3_longrope", "attention", {}),
        ("llama2", "attention", {"method": "full", "adapter": None}),
    ],
)
def test_sharded_weights_make_the_run_of_one(
    tmp_path: Path, family: str, variant: str, changes: dict[str, Any]
) -> None:
    losses, trained = same_run(tmp_path, 2, family, variant, parallel="fsdp2", **changes)
    assert losses < 1e-6
    assert trained < 1e-4


def test_what_sharded_ranks_saved_any_number_of_ranks_takes_up(tmp_path: Path) -> None:
    data, plan = golden_rows("llama31", "attention"), [Step([0, 1], 1e-3), Step([2, 3], 1e-3)]
    changes: dict[str, Any] = {"parallel": "fsdp2", "dropout": 0.1}
    whole = tmp_path / "whole"
    script = Script(2).step(data, plan[0]).save(whole / "state", state=True).step(data, plan[1])
    job = train_job(whole, "llama31", "attention", **changes)
    expected = processes.run_ranks(whole, job, 2, script.save(whole / "output" / "saved").close()).done()
    files = sorted(path.name for path in (whole / "state").iterdir())
    assert files == [
        f"{name}-0000{shard}-of-00002.safetensors"
        for name in ("exp_avg", "exp_avg_sq", "trainable")
        for shard in (1, 2)
    ]
    for ranks in (1, 2):
        folder = tmp_path / f"{ranks}-ranks"
        script = Script(ranks).restore(whole / "state", 1).step(data, plan[1]).save(folder / "output" / "saved")
        job = train_job(folder, "llama31", "attention", **changes)
        resumed = processes.run_ranks(folder, job, ranks, script.close()).done()
        if ranks == 2:
            assert all(torch.equal(resumed.trained[name], value) for name, value in expected.trained.items())
        assert worst(resumed.trained, expected.trained) < 1e-4


@takes_minutes
@pytest.mark.parametrize("changes", [{}, {"method": "full", "adapter": None}])
def test_compiled_layers_of_sharded_weights_make_the_run_of_one(tmp_path: Path, changes: dict[str, Any]) -> None:
    # To compile takes longer than a rank may wait for another in other tests.
    compiled: dict[str, Any] = {"compile": "layers", "watchdog_seconds": 900.0}
    losses, trained = same_run(tmp_path, 2, "llama31", "attention", parallel="fsdp2", **compiled, **changes)
    assert losses < 1e-6
    assert trained < 1e-4


def test_every_rank_leaves_a_trace(tmp_path: Path) -> None:
    job = train_job(tmp_path, "llama31", "all_linear", profile=True)
    ran = processes.run_ranks(tmp_path, job, 2, golden_script("llama31", "all_linear", tmp_path, 2)).done()
    assert ran.how["ranks"] == 2
    assert all(len(step["peak_memory_bytes"]) == 2 for step in ran.steps)
    assert min(ran.steps[-1]["peak_memory_bytes"]) > 50 << 20
    for rank in range(2):
        trace = json.loads((tmp_path / "run" / f"torch-rank-{rank}.trace.json").read_text())
        assert any("backward" in event.get("name", "").lower() for event in trace["traceEvents"])


def long() -> bytes:
    """Requests of so many steps that they do not end by themselves."""
    return Script(2).steps(golden_rows("llama31", "attention"), [Step([0, 1, 2, 3], 1e-3)] * 400).data


def test_a_rank_that_fails_is_named_with_its_words(tmp_path: Path) -> None:
    rows = golden_rows("llama31", "attention")
    ids, labels, lengths = rows[5]
    rows[5] = ([99_999, *ids[1:]], labels, lengths)
    script = Script(2).step(rows, Step([0, 1], 1e-3)).step(rows, Step([4, 5], 1e-3)).data
    failed = processes.run_ranks(tmp_path, train_job(tmp_path, "llama31", "attention"), 2, script).failed
    assert failed["messages"][0].startswith("rank 1: ")
    assert "index" in failed["messages"][0]


def test_a_rank_that_hangs_is_named_with_step_and_collective(tmp_path: Path) -> None:
    job = train_job(tmp_path, "llama31", "attention", watchdog_seconds=3.0)
    running = processes.start(tmp_path, job, 2, long())
    running.wait_for_answers(3)
    running.kill(1, signal.SIGSTOP)
    ran = running.finish()
    running.kill(1, signal.SIGKILL)
    failed = ran.failed
    assert failed["cause"] == "timeout"
    assert "rank 0 has waited 3 s in `" in failed["messages"][0]
    assert "of step " in failed["messages"][0]
    assert failed["messages"][0].endswith("; ranks that are stopped, gone or out of reach: 1")


def test_rank_0_that_hangs_is_named_by_the_others(tmp_path: Path) -> None:
    job = train_job(tmp_path, "llama31", "attention", watchdog_seconds=3.0)
    running = processes.start(tmp_path, job, 2, long())
    running.wait_for_answers(3)
    running.kill(0, signal.SIGSTOP)
    running.ranks[1].join(60.0)
    running.kill(0, signal.SIGKILL)
    assert running.ranks[1].exitcode == 1
    said = (tmp_path / "errors-1.txt").read_text()
    assert "rank 1 has waited 3 s for the store of the ranks" in said
    assert said.rstrip().endswith("; ranks that are stopped, gone or out of reach: 0")


def test_a_rank_that_dies_ends_the_run(tmp_path: Path) -> None:
    job = train_job(tmp_path, "llama31", "attention", watchdog_seconds=20.0)
    running = processes.start(tmp_path, job, 2, long())
    running.wait_for_answers(3)
    running.kill(1, signal.SIGKILL)
    failed = running.finish().failed
    assert failed["cause"] == "crashed"
    assert "of step " in failed["messages"][0]


def test_ranks_end_with_their_requests_and_not_by_what_asks_the_stage_to_stop(tmp_path: Path) -> None:
    running = processes.start(tmp_path, train_job(tmp_path, "llama31", "attention"), 2)
    running.wait_for_answers(1)
    for rank in range(2):
        running.kill(rank, signal.SIGTERM)
        running.kill(rank, signal.SIGINT)
    running.send(Script(2).step(golden_rows("llama31", "attention"), Step([0, 1], 1e-3)).data)
    running.wait_for_answers(2)
    # The stage process is gone.
    running.requests.close()
    running.wait_for_end()
