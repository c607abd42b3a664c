"""Architectures that the native backend lacks, each as transformers computes it: one dense, one mixture of experts.

Their checkpoints are made here, with transformers itself. What they are compared with is a plain loop over transformers and PEFT.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import processes
from pipeline_torch_worker import attention
from pipeline_torch_worker.architecture import embedding_parameters, hands_attention_over, layers_of, shares_state
from pipeline_torch_worker.attention import NAME
from pipeline_torch_worker.data import read_batches
from pipeline_torch_worker.device import Device
from pipeline_torch_worker.draws import Draws
from pipeline_torch_worker.failure import JobFailure
from pipeline_torch_worker.model import DocumentLoss, load_base, read_config, recompute_layers
from support import Ran, Script, Step, TokenRow, encoded, infer_job, run_here, train_job, worst

VOCABULARY = 96
RATE = 3e-3
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OF_ATTENTION = {"num_attention_heads", "num_key_value_heads", "max_position_embeddings"}
WITHOUT_ATTENTION = ["mamba", "falcon_mamba", "rwkv"]
KINDS = ["sliding_attention", "full_attention"]
# The last two layers attend to keys and values of layers before.
SHARING: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": KINDS * 3,
    "num_kv_shared_layers": 2,
    "head_dim": 8,
    "sliding_window": 4,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    "llama4_text": {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "gemma3n_text": {**SHARING, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 6},
    "gemma4_text": {**SHARING, "num_hidden_layers": 4, "layer_types": KINDS * 2, "global_head_dim": 8},
}
BOTH = ["olmo2", "qwen3_moe"]


def checkpoint(folder: Path, family: str, **changes: Any) -> Path:
    """A checkpoint of a family, as transformers writes it."""
    torch.manual_seed(0)
    left_out = OF_ATTENTION if family in WITHOUT_ATTENTION else set()
    shape = {name: size for name, size in SHAPE.items() if name not in left_out}
    config = AutoConfig.for_model(family, **{**shape, **OF_FAMILY.get(family, {}), **changes})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.2 * noise if parameter.dim() > 1 else 1 + 0.1 * noise)
    model.save_pretrained(folder)
    return folder


def plain(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, PreTrainedModel)
    model.eval()
    return model


def rows(count: int, documents: int = 1) -> list[TokenRow]:
    """Rows of documents, of which the first few tokens are no targets."""
    random = np.random.default_rng(7)
    made: list[TokenRow] = []
    for _ in range(count):
        ids: list[int] = []
        labels: list[int] = []
        lengths = [int(length) for length in random.integers(5, 12, documents)]
        for length in lengths:
            document = [int(token) for token in random.integers(3, VOCABULARY, length)]
            ids += document
            labels += [-100, -100, *document[2:]]
        made.append((ids, labels, lengths))
    return made


def nll(model: torch.nn.Module, row: TokenRow) -> torch.Tensor:
    """The losses of a row's targets by transformers' own forward, document by document."""
    losses, start = [], 0
    for length in row[2]:
        ids = torch.tensor([row[0][start : start + length]])
        labels = torch.tensor(row[1][start : start + length])
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
        losses.append(F.cross_entropy(logits[:-1], labels[1:], reduction="none", ignore_index=-100)[labels[1:] != -100])
        start += length
    return torch.cat(losses)


def reference(model: torch.nn.Module, data: list[TokenRow], per_step: int) -> list[float]:
    """A plain training loop: AdamW over the mean loss of the targets of each step's rows."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    losses = []
    for start in range(0, len(data), per_step):
        optimizer.zero_grad()
        loss = torch.cat([nll(model, row) for row in data[start : start + per_step]]).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def job(root: Path, model: Path, packed: bool = False, **changes: Any) -> dict[str, Any]:
    """A job that trains a model."""
    made = train_job(root, "llama31", "attention")
    optimizer = {"name": "adamw", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
    common = {"model": str(model), "dropout": 0.0, "clip_grad_norm": None, "optimizer": optimizer, "packed": packed}
    return {**made, **common, **changes}


def script(root: Path, data: list[TokenRow], ranks: int = 1) -> bytes:
    """Requests that train two rows a step, and save what came of it."""
    plan = [Step(list(range(start, start + 2)), RATE) for start in range(0, len(data), 2)]
    return Script(ranks).steps(data, plan, at_once=2 // ranks).save(root / "output" / "saved").close()


def train(root: Path, model: Path, data: list[TokenRow], **changes: Any) -> Ran:
    """What the worker makes of rows."""
    return run_here(root, job(root, model, **changes), script(root, data))


def fresh_adapter(model: Path, folder: Path, targets: Sequence[str] = ("q_proj", "v_proj", "o_proj")) -> Path:
    """An adapter as PEFT makes it, on some linear layers."""
    torch.manual_seed(1)
    adapted = get_peft_model(plain(model), LoraConfig(r=4, lora_alpha=8, target_modules=list(targets)))
    adapted.save_pretrained(str(folder))
    return folder


def trains_lora(root: Path, family: str) -> tuple[Ran, PeftModel, list[float]]:
    """What the worker and the plain loop make of the same adapter."""
    model = checkpoint(root / "model", family)
    start = fresh_adapter(model, root / "start")
    data = rows(12)
    ran = train(root, model, data, adapter=str(start)).done()
    adapted = PeftModel.from_pretrained(plain(model), str(start), is_trainable=True).eval()
    return ran, adapted, reference(adapted, data, 2)


@pytest.mark.parametrize("family", BOTH)
def test_an_adapter_trains_as_in_a_plain_loop(tmp_path: Path, family: str) -> None:
    ran, adapted, expected = trains_lora(tmp_path, family)
    assert ran.losses == pytest.approx(expected, rel=1e-5)
    # PEFT loads what is left, and computes the same with it.
    left = tmp_path / "left"
    shutil.copytree(tmp_path / "start", left)
    save_file(ran.trained, left / "adapter_model.safetensors")
    loaded = PeftModel.from_pretrained(plain(tmp_path / "model"), str(left)).eval()
    row = rows(1)[0]
    with torch.no_grad():
        assert torch.allclose(nll(loaded, row), nll(adapted, row), rtol=1e-3)


@pytest.mark.parametrize("family", BOTH)
def test_all_weights_train_as_in_a_plain_loop(tmp_path: Path, family: str) -> None:
    model = checkpoint(tmp_path / "model", family)
    data = rows(12)
    ran = train(tmp_path, model, data, method="full", adapter=None).done()
    trained = plain(model)
    assert ran.losses == pytest.approx(reference(trained, data, 2), rel=1e-5)
    # The files have the names that the base's have: transformers makes one tensor of a layer's experts, and they are many again.
    assert ran.trained.keys() == load_file(model / "model.safetensors").keys()
    left = tmp_path / "left"
    shutil.copytree(model, left)
    save_file(ran.trained, left / "model.safetensors", metadata={"format": "pt"})
    row = rows(1)[0]
    with torch.no_grad():
        assert torch.allclose(nll(plain(left), row), nll(trained, row), rtol=1e-3)


def without_prefix(folder: Path, prefix: str) -> Path:
    """Leaves it out of the names in a checkpoint's or an adapter's file."""
    (path,) = folder.glob("*.safetensors")
    save_file({name.replace(prefix, "", 1): value for name, value in load_file(path).items()}, path, {"format": "pt"})
    return folder


def test_files_that_name_the_decoders_tensors_are_trained_and_written_as_they_are(tmp_path: Path) -> None:
    data, runs = rows(4), []
    for name in ("whole", "bare"):
        folder = checkpoint(tmp_path / name / "model", "gpt2")
        if name == "bare":
            without_prefix(folder, "transformer.")
        runs.append(train(tmp_path / name, folder, data, method="full", adapter=None).done())
        assert runs[-1].trained.keys() == load_file(folder / "model.safetensors").keys()
    whole, bare = runs
    assert bare.losses == whole.losses
    assert worst({f"transformer.{name}": value for name, value in bare.trained.items()}, whole.trained) == 0


def test_an_adapter_by_the_names_of_such_files_is_refused(tmp_path: Path) -> None:
    folder = without_prefix(checkpoint(tmp_path / "model", "gpt2"), "transformer.")
    start = without_prefix(fresh_adapter(folder, tmp_path / "start", ["c_attn"]), "transformer.")
    failed = train(tmp_path, folder, rows(2), adapter=str(start)).failed
    assert failed["help"].startswith("the model's files leave `transformer.` out: save the model anew")


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_muon_is_of_the_layers_whatever_embeddings_are_called(tmp_path: Path, family: str) -> None:
    folder = checkpoint(tmp_path / "model", family, tie_word_embeddings=False)
    optimizer = {"name": "muon", "weight_decay": 0.1, "adamw": {"weight_decay": 0.01}}
    data = rows(2)
    ran = train(tmp_path, folder, data, method="full", adapter=None, optimizer=optimizer).done()
    model = plain(folder)
    torch.cat([nll(model, row) for row in data]).mean().backward()
    # They call the list of their layers so.
    hidden = {name for name, p in model.named_parameters() if p.dim() == 2 and (".h." in name or ".layers." in name)}
    muon = [parameter for name, parameter in model.named_parameters() if name in hidden]
    others = [parameter for name, parameter in model.named_parameters() if name not in hidden]
    torch.optim.Muon(muon, lr=RATE, weight_decay=0.1).step()
    torch.optim.AdamW(others, lr=RATE, weight_decay=0.01).step()
    shutil.copytree(folder, tmp_path / "left")
    save_file(ran.trained, tmp_path / "left" / "model.safetensors", metadata={"format": "pt"})
    left = plain(tmp_path / "left").state_dict()
    # The gradient of a bias on keys is rounding.
    for name, expected in model.state_dict().items():
        if expected.dim() == 2:
            # Muon brings a gradient to norm 1 in bf16.
            limit = 1e-1 * RATE if name in hidden else 1e-3 * RATE
            assert torch.allclose(left[name], expected, rtol=0, atol=limit), name


def test_rows_of_tokens_that_are_not_read_need_not_move(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", "olmo2")
    config = LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [1, 2]})
    get_peft_model(plain(model), config).save_pretrained(str(tmp_path / "start"))
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    before = load_file(tmp_path / "start" / "adapter_model.safetensors")[name]
    data = rows(10)
    # Nothing reads the first of the two.
    data[9][0][2] = 2
    changes: dict[str, Any] = {"adapter": str(tmp_path / "start"), "optimizer": {"name": "adamw", "weight_decay": 0.0}}
    for read in (False, True):
        root = tmp_path / f"run-{read}"
        ran = train(root, model, data if read else data[:8], **changes).done()
        assert len(ran.losses) == (5 if read else 4)
        assert (ran.trained[name] != before).any(dim=1).tolist() == [False, read]


def test_what_adapts_an_embedding_is_of_it(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", "gpt2")
    model = plain(folder)
    targets = ["wte", "c_attn", "lm_head"]
    get_peft_model(model, LoraConfig(r=4, target_modules=targets, modules_to_save=["wpe"], fan_in_fan_out=True))
    found = {id(parameter) for parameter in embedding_parameters(model)}
    trained = {name: id(parameter) in found for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name, is_embedding in trained.items() if not is_embedding} == {
        f"transformer.h.{layer}.attn.c_attn.lora_{matrix}.default.weight" for layer in range(2) for matrix in "AB"
    }
    assert len(trained) == 4 + 2 + 2 + 1


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_layers_that_read_keys_of_others_have_the_same_gradients_when_they_are_computed_again(
    tmp_path: Path, family: str
) -> None:
    model = checkpoint(tmp_path / "model", family)
    start = fresh_adapter(model, tmp_path / "start", ["q_proj", "k_proj", "v_proj"])
    data = rows(6)
    kept, again = (
        train(tmp_path / name, model, data, adapter=str(start), activation_checkpointing=name == "again").done()
        for name in ("kept", "again")
    )
    assert [step["grad_norm"] for step in again.steps] == pytest.approx([step["grad_norm"] for step in kept.steps])
    assert worst(again.trained, kept.trained) < 1e-5


def test_what_a_layer_does_to_an_object_that_cannot_be_copied_is_not_computed_again(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", "olmo2")
    model = load_base(folder, read_config(folder), torch.float32, NAME)
    recompute_layers(model, Draws(0), nested=True)
    with pytest.raises(JobFailure, match=r"`activation_checkpointing` cannot .* to `shared`, a `tuple_iterator`"):
        layers_of(model)[0](torch.zeros(1, 1, 32), shared=iter(()))


@pytest.mark.parametrize("family", BOTH)
def test_packed_documents_are_computed_as_apart(tmp_path: Path, family: str) -> None:
    folder = checkpoint(tmp_path / "model", family)
    model = load_base(folder, read_config(folder), torch.float32, NAME)
    loss = DocumentLoss(model, "sdpa", Draws(0))
    row = rows(1, documents=3)[0]

    @torch.no_grad()
    def losses(row: TokenRow) -> torch.Tensor:
        counts, payload = encoded([(0, row)])
        ((batch,),) = read_batches([[counts]], memoryview(payload))
        return loss.scores(batch)[0]

    with torch.no_grad():
        assert torch.allclose(losses(row), nll(plain(folder), row), rtol=1e-5)
    first = row[2][0]
    other = ([*reversed(row[0][:first]), *row[0][first:]], row[1], row[2])
    targets = first - 2
    assert not torch.allclose(losses(other)[:targets], losses(row)[:targets], rtol=1e-2)
    assert torch.allclose(losses(other)[targets:], losses(row)[targets:], rtol=1e-6)


def test_packed_rows_train_to_the_losses_of_their_documents(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", "qwen3_moe")
    start = fresh_adapter(model, tmp_path / "start")
    data = rows(6, documents=2)
    ran = train(tmp_path, model, data, packed=True, adapter=str(start)).done()
    adapted = PeftModel.from_pretrained(plain(model), str(start), is_trainable=True).eval()
    assert ran.losses == pytest.approx(reference(adapted, data, 2), rel=1e-5)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mamba", {}, "layers of type `linear_attention`"),
        ("falcon_mamba", {}, "layers of type `linear_attention`"),
        ("rwkv", {}, "`RwkvBlock`, which carries state from token to token"),
        ("llama4_text", {}, "layers of type `chunked_attention`"),
        ("nemotron", {}, "attention that is computed by code of its own"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of type `conv`"),
        ("gpt_oss", {}, "attention sinks in `GptOssAttention`"),
        ("bloom", {}, "attention that is computed by code of its own"),
    ],
)
def test_what_goes_from_document_to_document_is_refused_in_packs_and_computed_alone(
    tmp_path: Path, family: str, changes: dict[str, Any], words: str
) -> None:
    model = checkpoint(tmp_path / "model", family, **changes)
    data = rows(4, documents=2)
    failed = train(tmp_path, model, data, packed=True, method="full", adapter=None).failed
    assert failed["messages"][0] == f"`{family}` has {words}: the documents of a packed row would not be apart"
    alone = rows(4)
    ran = train(tmp_path, model, alone, method="full", adapter=None).done()
    assert ran.losses == pytest.approx(reference(plain(model), alone, 2), rel=1e-5)


def test_weights_that_transformers_scales_to_infer_are_trained_as_they_are(tmp_path: Path) -> None:
    data, runs = rows(4), []
    for every in (1, 0):
        folder = checkpoint(tmp_path / f"model-{every}", "rwkv", rescale_every=every)
        runs.append(train(tmp_path / f"run-{every}", folder, data, method="full", adapter=None).done())
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-6)
    assert worst(runs[0].trained, runs[1].trained) < 1e-5


def test_an_attention_that_does_not_cut_is_found_before_the_first_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "model", "olmo2")
    cut = attention.Documents.__init__

    def all_as_one(self: attention.Documents, lengths: list[int], *more: Any) -> None:
        cut(self, [sum(lengths)], *more)

    monkeypatch.setattr(attention.Documents, "__init__", all_as_one)
    failed = train(tmp_path, folder, rows(4), method="full", adapter=None).failed
    assert failed["messages"] == ["`olmo2`: a document behind another is not computed as it is alone"]


def test_what_an_attention_does_not_know_is_an_error() -> None:
    query = torch.zeros(1, 4, 3, 8)
    documents = attention.Documents([3], "sdpa", query.device)
    with pytest.raises(JobFailure, match="`s_aux`"):
        attention.attend(torch.nn.Identity(), query, query, query, None, 1.0, documents, s_aux=torch.zeros(4))
    with pytest.raises(JobFailure, match="not causal"):
        attention.attend(torch.nn.Identity(), query, query, query, None, 1.0, documents, is_causal=False)


@pytest.mark.parametrize("family", ["olmo2", "qwen3_moe", "cohere", "granite", "gpt_neox", "rwkv", "nemotron"])
def test_scores_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    # The scales that cohere and granite put on their logits are part of them.
    changes = {"cohere": {"logit_scale": 0.25}, "granite": {"logits_scaling": 4.0}}.get(family, {})
    folder = checkpoint(tmp_path / "model", family, **changes)
    data = rows(3)
    script = Script().score(data).close()
    (scores,) = run_here(tmp_path, infer_job("llama31", model=str(folder)), script).done().results
    with torch.no_grad():
        expected = [float(nll(plain(folder), row).sum()) for row in data]
    assert [nll for _, nll, _, _ in scores] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", [*BOTH, "mamba", "gpt_oss", "llama4_text", "nemotron"])
def test_answers_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    folder = checkpoint(tmp_path / "model", family)
    prompts = [[5, 9, 31], [7, 8, 9, 10, 11], [40]]
    asked = [{"input_ids": prompt, "seed": 0, "row": row} for row, prompt in enumerate(prompts)]
    script = Script().generate(asked, max_new_tokens=6).close()
    (completions,) = run_here(tmp_path, infer_job("llama31", model=str(folder)), script).done().results
    answers = [completion["output_ids"] for completion in completions]
    model = plain(folder)
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            found = cast(Any, model).generate(
                torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=[]
            )
        assert answer == found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["olmo2", "gpt2", "mamba"])
def test_completions_end_where_the_positions_do(tmp_path: Path, family: str) -> None:
    folder = checkpoint(tmp_path / "model", family)
    prompts = [[5] * 3, [7] * 60]
    asked = [{"input_ids": prompt, "seed": 0} for prompt in prompts]
    script = Script().generate(asked, max_new_tokens=8).generate(asked[1:], max_new_tokens=8).close()
    together, alone = run_here(tmp_path, infer_job("llama31", model=str(folder)), script).done().results
    # What state models read has no positions.
    most = 8 if family == "mamba" else 4
    assert [len(completion["output_ids"]) for completion in together] == [8, most]
    assert {completion["ended"] for completion in together} == {"length"}
    assert alone == together[1:]
    script = Script().generate([{"input_ids": [7] * 64, "seed": 0}]).close()
    ran = run_here(tmp_path, infer_job("llama31", model=str(folder)), script)
    if family == "mamba":
        ran.done()
    else:
        assert ran.failed["messages"] == ["a prompt has 64 tokens, and the model has 64 positions"]


@pytest.mark.parametrize(("family", "method"), [("olmo2", "lora"), ("olmo2", "full"), ("qwen3_moe", "full")])
def test_sharded_weights_are_read_share_by_share(tmp_path: Path, family: str, method: str) -> None:
    model = checkpoint(tmp_path / "model", family)
    data = rows(12)
    adapter = str(fresh_adapter(model, tmp_path / "start")) if method == "lora" else None
    runs = []
    for parallel in ("ddp", "fsdp2"):
        root = tmp_path / parallel
        root.mkdir()
        given = job(root, model, method=method, adapter=adapter, parallel=parallel)
        runs.append(processes.run_ranks(root, given, 2, script(root, data, ranks=2)).done())
    ddp, fsdp2 = runs
    assert fsdp2.losses == pytest.approx(ddp.losses, rel=1e-6)
    assert worst(fsdp2.trained, ddp.trained) < 1e-4
    logs = [(tmp_path / "fsdp2" / f"errors-{rank}.txt").read_text() for rank in range(2)]
    if family == "qwen3_moe":
        # Its experts are one tensor in memory and many in the files.
        assert all("each rank reads the whole checkpoint: transformers makes another tensor of" in log for log in logs)
        return
    total = sum(tensor.nbytes for tensor in load_file(model / "model.safetensors").values())
    read = [int(log.split("has read ")[1].split(" bytes")[0]) for log in logs]
    assert read == [total // 2, total // 2]


def test_a_native_family_shares_nothing(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", "llama")
    assert shares_state(load_base(folder, read_config(folder), torch.float32, NAME)) is None


@pytest.mark.parametrize(
    ("family", "changes", "handed"),
    [
        ("mixtral", {"sliding_window": 8}, True),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}, True),
        # Their windows are in the mask alone.
        ("phimoe", {"sliding_window": 8}, False),
        (
            "qwen2_moe",
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2},
            False,
        ),
        ("phimoe", {"sliding_window": None}, True),
        ("qwen2_moe", {"use_sliding_window": False}, True),
    ],
)
def test_a_window_that_is_in_the_mask_alone_is_left_to_transformers(
    family: str, changes: dict[str, Any], handed: bool
) -> None:
    config = AutoConfig.for_model(family, **{**SHAPE, **OF_FAMILY.get(family, {}), **changes})
    assert hands_attention_over(config) is handed


def test_layers_with_heads_of_several_widths_have_a_kernel() -> None:
    sizes = {**SHAPE, **OF_FAMILY["gemma4_text"], "global_head_dim": 16}
    config = AutoConfig.for_model("gemma4_text", **sizes)
    assert attention.choose("auto", Device("cpu", torch.device("cpu"), "cpu"), "f32", config) == "sdpa"
