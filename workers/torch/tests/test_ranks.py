"""Several ranks: the same run as one, whatever its share; and what becomes of a run whose ranks fail, hang or are stopped."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import processes
from support import golden_rows, run_here, run_torchrun, train_job, worst, write_rows, write_steps


def same_run(root: Path, ranks: int, family: str, variant: str, **changes: Any) -> tuple[float, float]:
    """The greatest differences of losses and of what is trained between one rank and several."""
    runs = []
    for name, count in (("one", 1), ("several", ranks)):
        folder = root / name
        folder.mkdir()
        job = train_job(folder, family, variant, **changes)
        # Steps of three rows: shares of two ranks are not alike.
        data = golden_rows(family, variant)
        plan = [
            {"epoch": 1, "rows": list(range(first, first + 3)), "learning_rate": 0.002}
            for first in range(0, len(data) - 2, 3)
        ]
        write_steps(folder / "steps.jsonl", plan)
        job["total_steps"] = len(plan)
        runs.append((run_here(folder, job) if count == 1 else processes.run_ranks(folder, job, count)).done())
    one, several = runs
    losses = max(abs(a / b - 1) for a, b in zip(several.losses, one.losses, strict=True))
    if changes.get("method") == "full":
        trained = [load_file(run.output / "model" / "model.safetensors") for run in (several, one)]
        return losses, worst(*trained)
    return losses, worst(several.adapter, one.adapter)


def test_two_ranks_under_torchrun_make_the_run_of_one(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = run_here(tmp_path / "one", train_job(tmp_path / "one", "llama31", "all_linear")).done()
    two = run_torchrun(tmp_path / "two", train_job(tmp_path / "two", "llama31", "all_linear", profile=True), 2).done()
    assert two.losses == pytest.approx(one.losses, rel=1e-6)
    assert worst(two.adapter, one.adapter) <= 1e-5
    assert two.events[0] == {"event": "started", "protocol": 1}
    assert two.events[-1]["how"]["ranks"] == 2
    assert [record["tokens"] for record in two.records] == [record["tokens"] for record in one.records]
    summary = json.loads((two.output / "summary.json").read_text())
    assert len(summary["peak_memory_bytes"]) == 2
    assert min(summary["peak_memory_bytes"]) > 50 << 20
    assert summary["progress"]["step"] == 6
    # A trace of each rank.
    for rank in range(2):
        trace = json.loads((tmp_path / "two" / "run" / f"torch-rank-{rank}.trace.json").read_text())
        assert any("backward" in event.get("name", "").lower() for event in trace["traceEvents"])


@pytest.mark.parametrize("variant", ["attention", "dropout"])
def test_three_ranks_make_the_run_of_one(tmp_path: Path, variant: str) -> None:
    losses, adapter = same_run(tmp_path, 3, "llama2", variant)
    assert losses < 1e-6
    assert adapter < 1e-5


@pytest.mark.parametrize(
    ("family", "variant", "changes"),
    [
        ("llama31", "dora", {}),
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


def test_a_run_of_two_sharded_ranks_is_resumed_exactly(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    changes: dict[str, Any] = {"parallel": "fsdp2", "save_every": 1, "keep_last": 9, "dropout": 0.1}
    expected = processes.run_ranks(whole, train_job(whole, "llama31", "attention", **changes), 2).done()
    job = train_job(cut, "llama31", "attention", **changes, resume=str(whole / "working" / "step-3"))
    resumed = processes.run_ranks(cut, job, 2).done()
    assert resumed.adapter_bytes == expected.adapter_bytes
    assert resumed.records == expected.records


def test_a_rank_that_fails_is_named_with_its_words(tmp_path: Path) -> None:
    job = train_job(tmp_path, "llama31", "attention", save_every=1)
    rows = golden_rows("llama31", "attention")
    ids, labels, lengths = rows[5]
    rows[5] = ([99_999, *ids[1:]], labels, lengths)
    job["data"] = write_rows(tmp_path / "data", rows)
    failed = processes.run_ranks(tmp_path, job, 2).failed
    # The second row of the third step is the second rank's.
    assert failed["messages"][0].startswith("rank 1: ")
    assert "index" in failed["messages"][0]


def test_a_rank_that_hangs_is_named_with_step_and_collective(tmp_path: Path) -> None:
    job = train_job(tmp_path, "llama31", "attention", save_every=1, watchdog_seconds=3.0)
    running = processes.start(tmp_path, long(tmp_path, job), 2)
    running.wait_for_step(2)
    running.kill(1, signal.SIGSTOP)
    ran = running.finish()
    running.kill(1, signal.SIGKILL)
    failed = ran.failed
    assert failed["cause"] == "timeout"
    assert "rank 0 has waited 3 s in `" in failed["messages"][0]
    assert "of step " in failed["messages"][0]
    assert failed["messages"][0].endswith("; ranks that are stopped, gone or out of reach: 1")


def test_a_rank_that_dies_ends_the_run(tmp_path: Path) -> None:
    job = train_job(tmp_path, "llama31", "attention", save_every=1, watchdog_seconds=20.0)
    running = processes.start(tmp_path, long(tmp_path, job), 2)
    running.wait_for_step(2)
    running.kill(1, signal.SIGKILL)
    failed = running.finish().failed
    assert failed["cause"] == "crashed"
    assert "of step " in failed["messages"][0]


def test_ranks_that_are_stopped_save_the_last_step_and_go_on_from_it(tmp_path: Path) -> None:
    job = train_job(tmp_path, "llama31", "attention", save_every=3)
    running = processes.start(tmp_path, long(tmp_path, job), 2)
    running.wait_for_step(3)
    for rank in range(2):
        running.kill(rank, signal.SIGTERM)
    failed = running.finish().failed
    assert failed["cause"] == "cancelled"
    saved = max(int(path.name[5:]) for path in (tmp_path / "working").glob("step-*"))
    assert failed["messages"] == [f"stopped after step {saved} of 400, which is saved"]
    assert json.loads((tmp_path / "working" / f"step-{saved}" / "state.json").read_text())["progress"]["step"] == saved


def long(root: Path, job: dict[str, Any]) -> dict[str, Any]:
    """The same job with so many steps that it does not end by itself."""
    write_steps(
        root / "steps.jsonl", [{"epoch": step + 1, "rows": [0, 1, 2, 3], "learning_rate": 1e-3} for step in range(400)]
    )
    return {**job, "total_steps": 400}
