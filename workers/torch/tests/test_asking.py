"""Scoring rows and answering prompts: every family's reference logits, and draws that depend on nothing but their addresses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import processes
from pipeline_torch_worker.sampling import Sampling
from support import GOLDEN, Ran, asking_job, run_here

FAMILIES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.safetensors"))


def lines_of(ran: Ran, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ran.done().output / name).read_text().splitlines()]


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_greedy_answers_are_those_of_the_reference(tmp_path: Path, family: str) -> None:
    expected = load_file(GOLDEN / family / "expected.safetensors")
    ids, logits = expected["input_ids"], expected["logits"]
    rows = [{"input_ids": row, "labels": row} for row in ids.tolist()]
    scores = lines_of(run_here(tmp_path, asking_job(tmp_path, family, "score", rows)), "scores.jsonl")
    nll = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").sum(dim=1)
    assert [score["loss"] for score in scores] == pytest.approx(nll.tolist(), rel=1e-5)
    assert [score["correct"] for score in scores] == (logits[:, :-1].argmax(-1) == ids[:, 1:]).sum(dim=1).tolist()
    assert [score["targets"] for score in scores] == [ids.shape[1] - 1] * 2

    prompt = expected["greedy_prompt"][0].tolist()
    # Beside a shorter one, so that there is padding.
    prompts = [{"input_ids": prompt[:5], "seed": 0}, {"input_ids": prompt, "seed": 0}]
    answers = lines_of(run_here(tmp_path, asking_job(tmp_path, family, "generate", prompts)), "answers.jsonl")
    assert answers[1] == {"output_ids": expected["greedy_ids"][0].tolist()[len(prompt) :], "ended": "length"}


def test_scores_are_those_of_the_adapted_model(tmp_path: Path) -> None:
    case = GOLDEN / "llama31" / "lora" / "dora"
    check = load_file(case / "merged.safetensors")
    ids, logits = check["check.input_ids"].view(1, -1), check["check.adapted_logits"].view(1, -1, 320)
    labels = [-100, -100, *ids[0, 2:].tolist()]
    rows = [{"input_ids": ids[0].tolist(), "labels": labels}, {"input_ids": [], "labels": []}]
    job = asking_job(tmp_path, "llama31", "score", rows, adapter=str(case / "adapter"))
    scored, empty = lines_of(run_here(tmp_path, job), "scores.jsonl")
    nll = torch.nn.functional.cross_entropy(logits[0, 1:-1], ids[0, 2:], reduction="sum")
    assert scored["loss"] == pytest.approx(float(nll), rel=1e-5)
    assert empty == {"loss": 0.0, "targets": 0, "correct": 0}


SAMPLED = {"temperature": 0.9, "top_k": 60, "top_p": 0.95, "repetition_penalty": 1.2, "max_new_tokens": 12}


def test_answers_depend_on_seeds_and_not_on_company_or_ranks(tmp_path: Path) -> None:
    prompts = [{"input_ids": list(range(5, 5 + length)), "seed": 7, "row": length} for length in (3, 9, 4, 4, 6)]

    def answers(name: str, ranks: int = 1, **changes: Any) -> list[dict[str, Any]]:
        root = tmp_path / name
        job = asking_job(root, "llama31", "generate", changes.pop("prompts", prompts), **{**SAMPLED, **changes})
        return lines_of(run_here(root, job) if ranks == 1 else processes.run_ranks(root, job, ranks), "answers.jsonl")

    together = answers("together", batch_size=5)
    assert answers("alone", batch_size=1) == together
    assert answers("ranks", ranks=2) == together
    assert answers("reversed", prompts=prompts[::-1]) == together[::-1]
    # Alike in prompt, seed and row, and else in the row.
    assert together[2] == together[3]
    others = answers("others", prompts=[{**prompt, "row": 99} for prompt in prompts])
    assert others != together
    stop = together[0]["output_ids"][3]
    stopped = answers("stopped", stop_ids=[stop])[0]
    before = together[0]["output_ids"].index(stop)
    assert stopped == {"output_ids": together[0]["output_ids"][:before], "ended": "stop"}
    longer = answers("longer", stop_ids=[stop], min_new_tokens=12)[0]
    assert (len(longer["output_ids"]), longer["ended"]) == (12, "length")
    assert stop not in longer["output_ids"]


def test_logits_are_processed_as_transformers_does() -> None:
    golden = json.loads((GOLDEN / "sampling.json").read_text())
    for case in golden["cases"]:
        settings = {name: case[name] for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
        logits, expected = (
            np.array([-np.inf if value is None else value for value in values], dtype=np.float32)
            for values in (golden["logits"][case["logits"]], case["processed"])
        )
        found = Sampling(**settings).process(logits, case["seen"], case["banned"])
        if case["logits"] in ("tied", "equal"):
            # Which of equals stay is not defined there.
            assert np.isneginf(found).sum() == np.isneginf(expected).sum(), case
            continue
        assert (np.isneginf(found) == np.isneginf(expected)).all(), case
        kept = ~np.isneginf(expected)
        assert np.allclose(found[kept], expected[kept], rtol=1e-5), case


def test_draws_follow_their_probabilities() -> None:
    logits = np.log(np.array([0.1, 0.6, 0.3], dtype=np.float32))
    counts = np.bincount(
        [Sampling(temperature=1.0).choose(logits, [0], [], 3, row) for row in range(2000)], minlength=3
    )
    assert np.allclose(counts / 2000, [0.1, 0.6, 0.3], atol=0.03)


def test_a_model_that_computes_no_numbers_is_said() -> None:
    with pytest.raises(Exception, match="the logit of token 1 is nan"):
        Sampling().choose(np.array([0.0, np.nan], dtype=np.float32), [0], [], 0, 0)
