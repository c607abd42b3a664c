"""Adapters with which PEFT saved embeddings, and those whose settings leave some of their tensors out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from support import Script, infer_job, run_here, serve_job
from test_architectures import checkpoint, nll, plain, rows, train

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
EMBEDDING, HEAD = f"{PREFIX}model.embed_tokens.weight", f"{PREFIX}lm_head.weight"
ROWS = f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"


def saved(model: Path, folder: Path, moved: bool, **settings: Any) -> Path:
    """An adapter that PEFT saves with the embedding and the head, which may have moved before."""
    base = plain(model)
    if moved:
        with torch.no_grad():
            for name, parameter in base.named_parameters():
                parameter.mul_(1.5 if "embed_tokens" in name or "lm_head" in name else 1)
    torch.manual_seed(1)
    targets = ["q_proj", "v_proj"]
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **settings))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" not in name and parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    adapted.save_pretrained(str(folder), save_embedding_layers=True)
    return folder


def scored(root: Path, model: Path, adapter: Path | None) -> list[float]:
    job = infer_job("llama31", model=str(model), adapter=None if adapter is None else str(adapter))
    (scores,) = run_here(root, job, Script().score(rows(2)).close()).done().results
    return [score[1] for score in scores]


def edit(adapter: Path, **settings: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("settings", [{}, {"modules_to_save": ["embed_tokens", "lm_head"]}])
@pytest.mark.parametrize("moved", [False, True])
def test_embeddings_saved_with_an_adapter_are_its_own(
    tmp_path: Path, moved: bool, settings: dict[str, Any], tied: bool
) -> None:
    model = checkpoint(tmp_path / "model", "olmo2", tie_word_embeddings=tied)
    adapter = saved(model, tmp_path / "adapter", moved and not settings, **settings)
    assert {EMBEDDING, HEAD} <= load_file(adapter / WEIGHTS).keys()
    # What PEFT makes of it.
    adapted = PeftModel.from_pretrained(plain(model), str(adapter)).eval()
    with torch.no_grad():
        expected = [float(nll(adapted, row).sum()) for row in rows(2)]
    assert scored(tmp_path / "scored", model, adapter) == pytest.approx(expected, rel=1e-5)

    # The base is what it was beside it, and for another adapter.
    other = saved(model, tmp_path / "other", False)
    prompt = [[5, 9, 2]]
    alone = Script().begin_batch(0, prompt).load_adapter("b", other).begin_batch(1, prompt, adapter="b")
    job = serve_job("llama31", model=str(model))
    base, of_other = run_here(tmp_path / "alone", job, alone.close()).done().logits
    script = Script().load_adapter("a", adapter).load_adapter("b", other).begin_batch(0, prompt, adapter="a")
    script.begin_batch(1, prompt, adapter="b").begin_batch(2, prompt)
    ran = run_here(tmp_path / "served", job, script.close()).done()
    assert [answer["error"] for answer in ran.answers if "error" in answer] == [None, None]
    with torch.no_grad():
        logits = adapted(input_ids=torch.tensor(prompt)).logits[:, -1:]
    assert torch.allclose(ran.logits[0], logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(ran.logits[1], of_other)
    assert torch.equal(ran.logits[2], base)

    # Trained are those that are not the base's.
    ran = train(tmp_path / "trained", model, rows(4), adapter=str(adapter)).done()
    assert {EMBEDDING, HEAD} & ran.trained.keys() == ({EMBEDDING, HEAD} if settings or moved else set())


def test_an_embedding_that_was_rounded_is_the_bases(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", "olmo2")
    adapter = saved(model, tmp_path / "adapter", moved=False)
    values = load_file(adapter / WEIGHTS)
    lora = {name: value for name, value in values.items() if "lora_" in name}
    save_file(lora | {name: values[name].bfloat16() for name in (EMBEDDING, HEAD)}, adapter / WEIGHTS)
    rounded = scored(tmp_path / "rounded", model, adapter)
    save_file(lora, adapter / WEIGHTS)
    assert rounded == scored(tmp_path / "without", model, adapter)


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_tokens_have_their_table_beside_them(tmp_path: Path, tied: bool) -> None:
    model = checkpoint(tmp_path / "model", "olmo2", tie_word_embeddings=tied)
    adapter = saved(model, tmp_path / "adapter", False, trainable_token_indices={"embed_tokens": [5, 9]})
    values = load_file(adapter / WEIGHTS)
    assert ROWS.replace("trainable_tokens_delta", "base_layer.weight") in values
    kept = {name: value for name, value in values.items() if "lora_" in name or name == ROWS}
    found = scored(tmp_path / "scored", model, adapter)
    ran = train(tmp_path / "trained", model, rows(2), adapter=str(adapter)).done()
    assert ran.trained.keys() == kept.keys()
    # As the stage process hands it to a run that trains it.
    save_file(kept, adapter / WEIGHTS)
    assert scored(tmp_path / "kept", model, adapter) == found
    assert train(tmp_path / "again", model, rows(2), adapter=str(adapter)).done().losses == ran.losses


@pytest.mark.parametrize(
    "settings", [{"target_modules": ["q_proj"]}, {"layers_to_transform": [0]}, {"exclude_modules": ["v_proj"]}]
)
def test_tensors_that_the_settings_leave_out_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = checkpoint(tmp_path / "model", "olmo2")
    adapter = saved(model, tmp_path / "adapter", moved=False)
    edit(adapter, **settings)
    job = infer_job("llama31", model=str(model), adapter=str(adapter))
    for ran in (run_here(tmp_path / "infer", job), train(tmp_path / "train", model, rows(2), adapter=str(adapter))):
        assert "different tensors" in ran.failed["messages"][0]
