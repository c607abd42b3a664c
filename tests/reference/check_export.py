#!/usr/bin/env python3
"""Proves from outside that what we write is what transformers and PEFT read, and the other way round.

    python -m venv venv
    venv/bin/pip install torch==2.15.* transformers==5.23.* peft==0.21.* safetensors
    cargo build --release && cargo build --release -p model --example logits
    venv/bin/python tests/reference/check_export.py [--only NAME,..] [--work FOLDER]

Three parts, each a list of cases below:
  written   a pipeline run by the built program (download or new_model, dataset, tokenize, train lora, merge, train full) on a tiny
            checkpoint of each family; PEFT loads our adapter, transformers our merged and our fully trained model.
  read      adapters with random matrices that PEFT writes, on a checkpoint that transformers writes; we load both.
  taken     the same adapters in a pipeline (download as: adapter): merged, merged two at a time with weights, trained further.

Each comparison runs three documents of unequal length, which we pack into one row and the reference runs one by one. Everything is
computed in f32 from the stored weights. A line per comparison: the largest difference of a logit, the largest logit, and
their ratio, which must not exceed the bound; a model must also be far from the one it was made of, so that an adapter that is
not read cannot pass. Ends with an error if a line fails. Takes about a minute on two cores; nothing is downloaded.
"""
import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import make_golden

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "tests/golden/data/tokenizers/bytelevel"
ROWS = ROOT / "pipelines/quickstart/identity.jsonl"
VOCAB, NEW_VOCAB = 2048, 500
BOUND = 1e-4
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


# --- Cases ---------------------------------------------------------------------------------------------------------------------


def bases():
    """name -> (configuration, number type of the file, size of a shard): the checkpoints that runs start from."""
    from transformers import Gemma2Config, GemmaConfig, LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config
    shape = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 max_position_embeddings=256, bos_token_id=None, eos_token_id=1, pad_token_id=None)
    untied, tied = dict(tie_word_embeddings=False), dict(tie_word_embeddings=True)
    llama3 = dict(rope_parameters=dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                       original_max_position_embeddings=64))
    longrope = dict(original_max_position_embeddings=16, rope_parameters=dict(
        rope_type="longrope", rope_theta=10000.0, short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        long_factor=[1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0]))
    f32, bf16, whole = torch.float32, torch.bfloat16, "1GB"
    return {
        "llama": (LlamaConfig(**shape, **untied, **llama3), f32, whole),
        "llama-tied": (LlamaConfig(**shape, **tied, **llama3), f32, whole),
        "llama-bf16": (LlamaConfig(**shape, **untied), bf16, "300KB"),
        "mistral": (MistralConfig(**shape, **untied, sliding_window=16), f32, whole),
        "qwen2": (Qwen2Config(**shape, **tied), f32, whole),
        "qwen3": (Qwen3Config(**shape, **tied, head_dim=24), f32, whole),
        "gemma": (GemmaConfig(**shape, head_dim=24), f32, whole),
        "gemma2": (Gemma2Config(**shape, head_dim=24, sliding_window=16, query_pre_attn_scalar=16), f32, whole),
        "phi3": (Phi3Config(**shape, **untied, sliding_window=16), f32, whole),
        "phi3-longrope": (Phi3Config(**shape, **untied, **longrope), f32, whole),
    }


# name -> (base, the `lora` of the pipeline file, also train it in full)
WRITTEN = {
    "llama": ("llama", dict(target_modules=LINEAR), True),
    "llama-rslora": ("llama", dict(target_modules=LINEAR, use_rslora=True), False),
    "llama-dora": ("llama", dict(target_modules=LINEAR, use_dora=True), False),
    "llama-modules-to-save": ("llama", dict(target_modules=["q_proj", "v_proj"], modules_to_save=["embed_tokens", "lm_head"]), False),
    "llama-lm-head": ("llama", dict(target_modules=["q_proj", "lm_head"]), False),
    "llama-tied-lm-head": ("llama-tied", dict(target_modules=["q_proj", "lm_head"]), False),
    "llama-bf16": ("llama-bf16", dict(target_modules=LINEAR), True),
    "mistral": ("mistral", dict(target_modules=LINEAR), True),
    "qwen2": ("qwen2", dict(target_modules=LINEAR), True),
    "qwen3": ("qwen3", dict(target_modules=LINEAR), True),
    "gemma": ("gemma", dict(target_modules=LINEAR), True),
    "gemma2": ("gemma2", dict(target_modules=LINEAR), True),
    "phi3": ("phi3", dict(target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]), True),
    "phi3-longrope": ("phi3-longrope", dict(target_modules=["qkv_proj", "down_proj"]), True),
    "new_model": (None, dict(target_modules=LINEAR), True),
}

# name -> (base, settings of PEFT's LoraConfig)
READ = {
    "peft-lora": ("llama", dict(target_modules=["q_proj", "v_proj"])),
    "peft-all-linear": ("llama", dict(target_modules="all-linear")),
    "peft-regex": ("llama", dict(target_modules=r".*\.layers\.1\..*(q|down)_proj")),
    "peft-rslora": ("llama", dict(target_modules=LINEAR, use_rslora=True)),
    "peft-patterns": ("llama", dict(target_modules=LINEAR, rank_pattern={"q_proj": 2, "layers.1.mlp.up_proj": 7},
                                    alpha_pattern={"v_proj": 32})),
    "peft-dora": ("llama", dict(target_modules=LINEAR, use_dora=True)),
    "peft-modules-to-save": ("llama", dict(target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"])),
    "peft-norms-to-save": ("llama", dict(target_modules=["q_proj"], modules_to_save=["input_layernorm"])),
    "peft-lm-head": ("llama", dict(target_modules=["q_proj", "lm_head"])),
    "peft-tied-lm-head": ("llama-tied", dict(target_modules=["q_proj", "lm_head"])),
    "peft-tied-head-to-save": ("llama-tied", dict(target_modules=["q_proj"], modules_to_save=["lm_head"])),
    "peft-tied-dora-lm-head": ("llama-tied", dict(target_modules=["q_proj", "lm_head"], use_dora=True)),
    "peft-layers": ("llama", dict(target_modules=LINEAR, layers_to_transform=[1], layers_pattern="layers")),
    "peft-exclude": ("llama", dict(target_modules="all-linear", exclude_modules=["k_proj"])),
    "peft-longrope": ("phi3-longrope", dict(target_modules=["qkv_proj", "down_proj"])),
    "peft-bf16-base": ("llama-bf16", dict(target_modules=LINEAR)),
    "peft-gemma2": ("gemma2", dict(target_modules=LINEAR)),
    "peft-qwen2": ("qwen2", dict(target_modules=LINEAR)),
    "peft-phi3-dora": ("phi3", dict(target_modules=["qkv_proj", "gate_up_proj"], use_dora=True)),
}

# name -> (the adapters, of READ and on one base, with their weights; also train the first one further)
TAKEN = {
    "taken-lora": ([("peft-lora", 1.0)], True),
    "taken-dora": ([("peft-dora", 1.0)], True),
    "taken-patterns": ([("peft-patterns", 1.0)], True),
    "taken-modules-to-save": ([("peft-modules-to-save", 1.0)], True),
    "taken-tied-lm-head": ([("peft-tied-lm-head", 1.0)], True),
    "taken-two": ([("peft-lora", 0.7), ("peft-rslora", -0.4)], False),
}


# --- Both sides' logits ----------------------------------------------------------------------------------------------------------


def documents():
    """Token ids of three documents; the longest is beyond the original length of phi3-longrope and every window."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(5, NEW_VOCAB - 20, (length,), generator=generator).tolist() for length in (12, 40, 7)]


class Ours:
    """The example that writes the logits of our decoder."""

    def __init__(self, program, work):
        self.program, self.work = program, work

    def logits(self, model, adapter=None):
        ids, out = self.work / "ids.json", self.work / "logits.safetensors"
        ids.write_text(json.dumps(documents()))
        command = [self.program, "--model", model, "--ids", ids, "--out", out]
        run(command + (["--adapter", adapter] if adapter else []))
        found = load_file(out)
        return [found[f"logits.{index}"] for index in range(len(found))]


def load(folder):
    """A checkpoint as transformers reads it, in f32; any weight that is missing or left over is an error."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[what]:
            raise Failure(f"transformers says of {folder.name}: {what}: {sorted(info[what])[:5]}")
    return model.eval()


def theirs(model):
    """The reference's logits, each document alone."""
    with torch.no_grad():
        return [model(input_ids=torch.tensor([ids])).logits[0].float() for ids in documents()]


def theirs_adapted(folder, adapter):
    return theirs(PeftModel.from_pretrained(load(folder), adapter).eval())


# --- The parts -------------------------------------------------------------------------------------------------------------------


def make_base(name, folder):
    config, dtype, shard = bases()[name]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    make_golden.randomise(model, 0)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    return folder


TRAIN = {"model": "base", "data": "tokens", "micro_batch_size": 8, "max_steps": 6, "optimizer": {"name": "adamw", "learning_rate": 1e-2}}


def data_stages():
    template = "Question: {question}\nAnswer: "
    columns = {"question": "question", "output": "answer"}
    return {
        "rows": {"uses": "dataset", "with": {"source": str(ROWS), "column_map": columns, "template": template}},
        "tokens": {"uses": "tokenize", "with": {"dataset": "rows", "tokenizer": "base", "max_seq_len": 128}},
    }


def written_stages(base, lora, full):
    if base is None:
        source = {"uses": "new_model", "with": dict(
            text="text", vocab_size=NEW_VOCAB, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1)}
    else:
        source = {"uses": "download", "with": {"path": str(base)}}
    stages = data_stages() | {
        "base": source,
        "adapter": {"uses": "train", "with": TRAIN | {"method": "lora", "lora": {"rank": 4, "alpha": 16} | lora}},
        "merged": {"uses": "merge", "with": {"model": "base", "adapter": "adapter"}},
    }
    if base is None:
        stages["text"] = {"uses": "dataset", "with": {"source": str(ROOT / "pipelines/quickstart/text.jsonl")}}
    if full:
        stages["full"] = {"uses": "train", "with": TRAIN | {"method": "full"}}
    return stages


def taken_stages(base, adapters, weights, further):
    names = [f"adapter{index}" for index in range(len(adapters))]
    stages = data_stages() | {"base": {"uses": "download", "with": {"path": str(base)}}}
    stages |= {name: {"uses": "download", "with": {"path": str(folder), "as": "adapter"}} for name, folder in zip(names, adapters)}
    weighted = [{"adapter": name, "weight": weight} for name, weight in zip(names, weights)]
    stages["merged"] = {"uses": "merge", "with": {"model": "base"} | ({"adapter": names[0]} if len(names) == 1 else {"adapters": weighted})}
    if further:
        stages["further"] = {"uses": "train", "with": TRAIN | {"adapter": names[0]}}
    return stages


def run_pipeline(program, stages, outputs, folder, work):
    """Runs the stages and copies outputs, by name, into folders beside the file. The file is JSON, which is YAML too."""
    file = folder / "pipeline.yaml"
    file.write_text(json.dumps({"version": 1, "name": "check_export", "stages": stages}, indent=1))
    environment = os.environ | {"PIPELINE_HOME": str(work / "home")}
    run([program, "run", file], environment)
    for output, to in outputs.items():
        run([program, "export", file, output, folder / to], environment)


def check_written(name, case, program, ours, work, table):
    base_name, lora, full = case
    folder = work / "written" / name
    folder.mkdir(parents=True)
    base = make_base(base_name, folder / "source") if base_name else None
    outputs = {"base.model": "base", "adapter.adapter": "adapter", "merged": "merged"} | ({"full.model": "full"} if full else {})
    run_pipeline(program, written_stages(base, lora, full), outputs, folder, work)

    base = folder / "base"
    plain, adapted = ours.logits(base), ours.logits(base, folder / "adapter")
    if base_name is None:
        table.add(name, "our new model in transformers", theirs(load(base)), plain)
    table.add(name, "our adapter in PEFT", theirs_adapted(base, folder / "adapter"), adapted, other_than=plain)
    merged = ours.logits(folder / "merged")
    table.add(name, "our merged model in transformers", theirs(load(folder / "merged")), merged, other_than=plain)
    dtype = torch.bfloat16 if base_name and bases()[base_name][1] == torch.bfloat16 else torch.float32
    # Merging rounds once to the type of the weights.
    bound = {torch.float32: BOUND, torch.bfloat16: 5e-2}[dtype]
    table.add(name, "merged against base with adapter", adapted, merged, bound=bound)
    if full:
        table.add(name, "our fully trained model in transformers", theirs(load(folder / "full")), ours.logits(folder / "full"), other_than=plain)


def make_adapter(case, folder):
    """A base and an adapter on it that changes it, as PEFT writes them."""
    base_name, settings = case
    folder.mkdir(parents=True)
    base = make_base(base_name, folder / "base")
    torch.manual_seed(1)
    model = get_peft_model(load(base), LoraConfig(task_type="CAUSAL_LM", **(dict(r=4, lora_alpha=16) | settings)))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            step = torch.randn(parameter.shape, generator=generator) * 0.05
            # Magnitudes and saved modules start as the base's; matrices of the update become random.
            parameter.copy_(step if "lora_A" in parameter_name or "lora_B" in parameter_name else parameter + step)
    model.eval().save_pretrained(folder / "adapter")
    return base, folder / "adapter"


def check_read(name, case, ours, work, table):
    base, adapter = make_adapter(case, work / "read" / name)
    plain = ours.logits(base)
    table.add(name, "the base in ours", theirs(load(base)), plain)
    table.add(name, "PEFT's adapter in ours", theirs_adapted(base, adapter), ours.logits(base, adapter), other_than=plain)


def check_taken(name, case, program, ours, work, table):
    weighted, further = case
    folder = work / "taken" / name
    made = [make_adapter(READ[adapter], folder / adapter) for adapter, _ in weighted]
    base, adapters, weights = made[0][0], [adapter for _, adapter in made], [weight for _, weight in weighted]
    outputs = {"merged": "merged"} | ({"further.adapter": "further"} if further else {})
    run_pipeline(program, taken_stages(base, adapters, weights, further), outputs, folder, work)

    model = PeftModel.from_pretrained(load(base), adapters[0], adapter_name="0")
    if len(adapters) > 1:
        for index, adapter in enumerate(adapters[1:], 1):
            model.load_adapter(adapter, adapter_name=str(index))
        model.add_weighted_adapter([str(index) for index in range(len(adapters))], weights, "sum", combination_type="cat")
        model.set_adapter("sum")
    # Of a tied head PEFT would merge into the one weight that is the embedding too, and warns of it: there the adapter itself counts.
    expected = theirs((model if model.config.tie_word_embeddings else model.merge_and_unload()).eval())
    plain, found = ours.logits(base), ours.logits(folder / "merged")
    table.add(name, "our merge against PEFT's", expected, found, other_than=plain)
    table.add(name, "our merged model in transformers", theirs(load(folder / "merged")), found)
    if further:
        trained = ours.logits(base, folder / "further")
        table.add(name, "trained further, in PEFT", theirs_adapted(base, folder / "further"), trained, other_than=found)


# --- Running ---------------------------------------------------------------------------------------------------------------------


class Failure(Exception):
    pass


def run(command, environment=None):
    done = subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise Failure(f"{' '.join(str(word) for word in command[:3])} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")


def distance(found, expected):
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


class Table:
    def __init__(self):
        self.failed = 0
        print(f"{'case':<24} {'compared':<42} {'max|Δlogit|':>12} {'max|logit|':>11} {'ratio':>9}")

    def add(self, case, what, expected, found, bound=BOUND, other_than=None):
        difference, largest = distance(found, expected), max(logits.abs().max().item() for logits in expected)
        note = "" if difference <= bound * largest else f"  FAILED: above {bound:.0e}"
        if other_than is not None and not distance(found, other_than) > 100 * BOUND * largest:
            note += "  FAILED: no different from the model before"
        self.failed += bool(note)
        print(f"{case:<24} {what:<42} {difference:>12.2e} {largest:>11.3f} {difference / largest:>9.1e}{note}", flush=True)

    def failure(self, case, error):
        self.failed += 1
        print(f"{case:<24} FAILED: {error}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", type=pathlib.Path, default=ROOT / "target/release/pipeline")
    parser.add_argument("--logits", type=pathlib.Path, default=ROOT / "target/release/examples/logits")
    parser.add_argument("--only", default="", help="names of cases, with commas between")
    parser.add_argument("--work", type=pathlib.Path, help="a new folder, kept; a temporary one if left out")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    wanted = [name for name in arguments.only.split(",") if name]
    unknown = [name for name in wanted if name not in WRITTEN | READ | TAKEN]
    if unknown:
        sys.exit(f"no such case: {', '.join(unknown)}; there are {', '.join(WRITTEN | READ | TAKEN)}")
    if arguments.work:
        arguments.work.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or pathlib.Path(temporary)
        ours, table = Ours(arguments.logits, work), Table()
        checks = {name: lambda name: check_written(name, WRITTEN[name], arguments.pipeline, ours, work, table) for name in WRITTEN}
        checks |= {name: lambda name: check_read(name, READ[name], ours, work, table) for name in READ}
        checks |= {name: lambda name: check_taken(name, TAKEN[name], arguments.pipeline, ours, work, table) for name in TAKEN}
        for name, check in checks.items():
            if wanted and name not in wanted:
                continue
            try:
                check(name)
            except (Failure, OSError, ValueError, RuntimeError, KeyError) as error:
                table.failure(name, error)
    if table.failed:
        sys.exit(f"{table.failed} failed")
    print("all within their bounds")


if __name__ == "__main__":
    main()
