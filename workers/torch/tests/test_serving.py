"""Logits on request: those of the reference whatever the company, and adapters that come, are switched and go."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import processes
from support import GOLDEN, Ran, Script, adapter_folder, run_here, serve_job
from test_fake_npu import NPU

# What a long text is turned by in another way has each row alone, whole.
ALONE = ("phi3_longrope", "phi3_longrope_partial")
FAMILIES = sorted({path.parent.name for path in GOLDEN.glob("*/expected.safetensors")} - set(ALONE))
WEIGHTS = "adapter_model.safetensors"


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-4 * expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_grow_leave_and_are_read_in_pieces_as_the_reference_has_them(tmp_path: Path, family: str) -> None:
    expected = load_file(GOLDEN / family / "expected.safetensors")
    ids, logits = expected["input_ids"].tolist(), expected["logits"]
    end = len(ids[0])
    script = Script().begin_batch(7, [ids[0][:3], ids[1][:6], ids[0][:6]])
    # Another batch in between, whose prompt is read in pieces.
    script.begin_batch(2, [ids[1][:4]], each=True).next_tokens(2, [0], [ids[1][4:end]], each=True)
    script.next_tokens(7, [0, 1, 2], [ids[0][3:4], ids[1][6:7], ids[0][6:7]])
    script.next_tokens(7, [0, 2], [ids[0][4:5], ids[0][7:8]]).request("end_batch", batch=2)
    script.next_tokens(7, [1], [ids[0][8:9]])
    ran = run_here(tmp_path, serve_job(family), script.close()).done()
    assert not ran.how["is_alone"]
    begun, piece, rest, three, two, one = ran.logits
    assert is_close(begun[:, 0], torch.stack([logits[0, 2], logits[1, 5], logits[0, 5]]))
    assert is_close(piece[0], logits[1, :4])
    assert is_close(rest[0], logits[1, 4:end])
    assert is_close(three[:, 0], torch.stack([logits[0, 3], logits[1, 6], logits[0, 6]]))
    assert is_close(two[:, 0], logits[0, [4, 7]])
    assert is_close(one[:, 0], logits[0, [8]])


@pytest.mark.parametrize("family", ALONE)
def test_a_model_that_has_rows_alone_says_so(tmp_path: Path, family: str) -> None:
    expected = load_file(GOLDEN / family / "expected.safetensors")
    script = Script().begin_batch(0, [expected["input_ids"][0].tolist()], each=True)
    ran = run_here(tmp_path, serve_job(family), script.close()).done()
    assert ran.how["is_alone"]
    assert is_close(ran.logits[0][0], expected["logits"][0])


def adapters(root: Path, script: Script) -> Ran:
    return run_here(root, serve_job("llama31"), script.close()).done()


def test_adapters_are_switched_between_batches_and_go(tmp_path: Path) -> None:
    prompt = [5, 9, 2, 7, 3]
    folders = [GOLDEN / "llama31" / "lora" / variant / "adapter" for variant in ("dora", "attention")]
    alone = []
    for index, folder in enumerate(folders):
        script = Script().load_adapter("a", folder).begin_batch(0, [prompt], adapter="a")
        alone += adapters(tmp_path / str(index), script).logits
    script = Script().begin_batch(0, [prompt]).load_adapter("one", folders[0]).load_adapter("two", folders[1])
    script.begin_batch(1, [prompt[:-1]], adapter="one").begin_batch(2, [prompt[:-1]], adapter="two")
    for batch in (1, 2):
        script.next_tokens(batch, [0], [prompt[-1:]])
    script.begin_batch(3, [prompt]).request("unload_adapter", adapter="one").begin_batch(4, [prompt], adapter="two")
    script.request("unload_adapter", adapter="two").begin_batch(5, [prompt])
    script.load_adapter("one", folders[1]).begin_batch(6, [prompt], adapter="one")
    base, _, _, one, two, base_beside, two_alone, base_alone, again = adapters(tmp_path / "both", script).logits
    assert is_close(one, alone[0])
    assert not is_close(one, base)
    for found in (two, two_alone, again):
        assert is_close(found, alone[1])
        assert not is_close(found, alone[0])
    assert torch.equal(base_beside, base)
    assert torch.equal(base_alone, base)


def test_adapters_that_do_not_fit_are_said_and_change_nothing(tmp_path: Path) -> None:
    good = adapter_folder("llama31", "attention", tmp_path / "good")
    renamed, shaped = (adapter_folder("llama31", "attention", tmp_path / name) for name in ("renamed", "shaped"))
    tensors = load_file(good / WEIGHTS)
    save_file({name.replace("q_proj", "r_proj"): tensor for name, tensor in tensors.items()}, renamed / WEIGHTS)
    save_file({name: tensor[:1].contiguous() for name, tensor in tensors.items()}, shaped / WEIGHTS)
    script = Script().begin_batch(0, [[5, 9, 2]])
    for name, folder in (("none", tmp_path), ("renamed", renamed), ("shaped", shaped), ("good", good)):
        script.load_adapter(name, folder)
    script.begin_batch(1, [[5, 9, 2]]).begin_batch(2, [[5, 9, 2]], adapter="good")
    ran = adapters(tmp_path, script)
    errors = [answer["error"] for answer in ran.answers if "error" in answer]
    assert "different tensors" in errors[1], errors
    assert [error is None for error in errors] == [False, False, False, True]
    before, after, _ = ran.logits
    assert torch.equal(before, after)


def test_logits_on_an_npu_are_those_on_the_processor(tmp_path: Path) -> None:
    folder = GOLDEN / "llama31" / "lora" / "dora" / "adapter"
    script = Script().load_adapter("a", folder).begin_batch(0, [[5, 9, 2], [4, 1]], adapter="a")
    script.next_tokens(0, [1], [[8]]).begin_batch(1, [[5, 9, 2]])
    expected = run_here(tmp_path / "cpu", serve_job("llama31"), script.close()).done()
    script = Script().load_adapter("a", folder).begin_batch(0, [[5, 9, 2], [4, 1]], adapter="a")
    script.next_tokens(0, [1], [[8]]).begin_batch(1, [[5, 9, 2]])
    ran = processes.run_ranks(tmp_path / "npu", serve_job("llama31", device="npu"), 1, script.close(), **NPU).done()
    assert ran.how["device"] == "npu"
    assert all(is_close(*pair) for pair in zip(ran.logits, expected.logits, strict=True))
