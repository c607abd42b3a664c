"""Scoring rows and completing prompts: every family's reference logits, and draws that depend on nothing but their addresses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import processes
from pipeline_torch_worker.adapter import attach
from pipeline_torch_worker.model import load_base, read_config
from pipeline_torch_worker.sampling import Sampling
from support import (
    GOLDEN,
    Script,
    Step,
    TokenRow,
    golden_rows,
    infer_job,
    run_here,
    train_job,
)

FAMILIES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.safetensors"))


def whole(ids: list[int]) -> TokenRow:
    """A row of which every token is learned."""
    return ids, ids, [len(ids)]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_process_gives_the_scores_and_greedy_completions_of_the_reference(tmp_path: Path, family: str) -> None:
    expected = load_file(GOLDEN / family / "expected.safetensors")
    ids, logits = expected["input_ids"], expected["logits"]
    prompt = expected["greedy_prompt"][0].tolist()
    # Beside a shorter one, so that there is padding.
    prompts = [{"input_ids": prompt[:5], "seed": 0}, {"input_ids": prompt, "seed": 0}]
    rows = [whole(row) for row in ids.tolist()]
    script = Script().generate(prompts).score(rows).generate(prompts).close()
    before, scores, after = run_here(tmp_path, infer_job(family), script).done().results
    nll = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").sum(dim=1)
    assert [score[:1] + score[2:3] for score in scores] == [[row, ids.shape[1] - 1] for row in range(2)]
    assert [score[1] for score in scores] == pytest.approx(nll.tolist(), rel=1e-5)
    assert [score[3] for score in scores] == (logits[:, :-1].argmax(-1) == ids[:, 1:]).sum(dim=1).tolist()
    assert before[1] == {"output_ids": expected["greedy_ids"][0].tolist()[len(prompt) :], "ended": "length"}
    assert after == before


def test_scores_are_those_of_the_adapted_model(tmp_path: Path) -> None:
    case = GOLDEN / "llama31" / "lora" / "dora"
    check = load_file(case / "merged.safetensors")
    ids, logits = check["check.input_ids"].view(1, -1), check["check.adapted_logits"].view(1, -1, 320)
    labels = [-100, -100, *ids[0, 2:].tolist()]
    script = Script().score([(ids[0].tolist(), labels, [len(labels)])]).close()
    (((_, loss, _, _),),) = run_here(tmp_path, infer_job("llama31", adapter=str(case / "adapter")), script).results
    nll = torch.nn.functional.cross_entropy(logits[0, 1:-1], ids[0, 2:], reduction="sum")
    assert loss == pytest.approx(float(nll), rel=1e-5)


def test_a_model_in_training_is_scored_and_completes_prompts_without_being_loaded_again(tmp_path: Path) -> None:
    data, prompts = golden_rows("llama31", "attention"), [{"input_ids": [5, 9, 2, 7], "seed": 1}]
    job, plan = train_job(tmp_path, "llama31", "attention", dropout=0.2), [Step([0, 1], 0.05), Step([2, 3], 0.05)]
    asked = Script().step(data, plan[0]).score(data[4:6]).generate(prompts).step(data, plan[1])
    ran = run_here(tmp_path, job, asked.score(data[4:6]).save(tmp_path / "output" / "saved").close()).done()
    plain = run_here(tmp_path / "plain", job, Script().steps(data, plan).close()).done()
    # That it was asked changes nothing of the training.
    assert ran.losses == plain.losses
    between, completions, after = ran.results
    assert between != after
    # And the answers are those of the adapter as it was.
    adapter = tmp_path / "adapter" / "adapter_model.safetensors"
    adapter.write_bytes((tmp_path / "output" / "saved" / "trainable.safetensors").read_bytes())
    script = Script().score(data[4:6]).generate(prompts).close()
    scores, _ = run_here(tmp_path / "apart", infer_job("llama31", adapter=str(adapter.parent)), script).done().results
    assert [score[1] for score in scores] == pytest.approx([score[1] for score in after], rel=1e-5)
    assert len(completions[0]["output_ids"]) == 24


def test_a_merge_is_compared_and_the_model_is_what_it_was(tmp_path: Path) -> None:
    folder = GOLDEN / "llama31" / "lora" / "dora" / "adapter"
    model = load_base(GOLDEN / "llama31", read_config(GOLDEN / "llama31"), torch.float32, attention=None)
    merged = cast(Any, attach(model, folder, trained=False).merge_and_unload())
    merged.save_pretrained(tmp_path / "merged")
    read_config(GOLDEN / "llama31").save_pretrained(tmp_path / "merged")
    rows = golden_rows("llama31", "dora")
    script = Script().score(rows[:2]).rows("compare", {0: rows[0]}, merged=str(tmp_path / "merged")).score(rows[:2])
    ran = run_here(tmp_path, infer_job("llama31", adapter=str(folder)), script.close()).done()
    before, after = ran.results
    assert before == after
    comparison = ran.answers[1]
    assert comparison["rows"] == len(rows[0][2])
    assert comparison["rounding"]["logits"]["max_abs_difference"] == 0
    assert 0 < comparison["merged"]["logits"]["max_abs_difference"] < 1e-4
    assert comparison["merged"]["top_1_agreement"] == 1


SAMPLED = {"temperature": 0.9, "top_k": 60, "top_p": 0.95, "repetition_penalty": 1.2, "max_new_tokens": 12}


def test_completions_depend_on_seeds_and_not_on_company_or_ranks(tmp_path: Path) -> None:
    prompts = [{"input_ids": list(range(5, 5 + length)), "seed": 7, "row": length} for length in (3, 9, 4, 4, 6)]

    def completed(script: Script, ranks: int = 1) -> list[list[dict[str, Any]]]:
        job = infer_job("llama31")
        here = run_here(tmp_path, job, script.close()) if ranks == 1 else None
        ran = here or processes.run_ranks(tmp_path / "ranks", job, ranks, script.close())
        return ran.done().results

    script = Script().generate(prompts, **SAMPLED)
    for prompt in prompts:
        script.generate([prompt], **SAMPLED)
    script.generate(prompts[::-1], **SAMPLED).generate([{**prompt, "row": 99} for prompt in prompts], **SAMPLED)
    together, *alone, backwards, others = completed(script)
    assert [completion for (completion,) in alone] == together
    assert completed(Script(2).generate(prompts, **SAMPLED), ranks=2) == [together]
    assert backwards == together[::-1]
    # Alike in prompt, seed and row, and else in the row.
    assert together[2] == together[3]
    assert others != together
    stop = together[0]["output_ids"][3]
    script = Script().generate(prompts, **SAMPLED, stop_ids=[stop])
    (stopped, *_), (longer, *_) = completed(script.generate(prompts, **SAMPLED, stop_ids=[stop], min_new_tokens=12))
    before = together[0]["output_ids"].index(stop)
    assert stopped == {"output_ids": together[0]["output_ids"][:before], "ended": "stop"}
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
