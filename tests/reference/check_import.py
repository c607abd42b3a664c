#!/usr/bin/env python3
"""Jobs by their own tool and by `pipeline` after `pipeline import`: do the losses agree?

    cargo build --release
    python3 -m venv trainer && trainer/bin/pip install torch transformers peft accelerate
    trainer/bin/python tests/reference/check_import.py axolotl
    python3 -m venv tune && tune/bin/pip install torch transformers torchtune==0.6.1 torchao==0.13.0 torchdata
    tune/bin/python tests/reference/check_import.py torchtune

Two environments, since PEFT refuses the torchao that torchtune needs. `torchtune` runs the recipe `lora_finetune_single_device` on a config. `axolotl` does what axolotl does with a configuration: PEFT and
transformers' Trainer, on prompts that are encoded as axolotl's alpaca strategy encodes them. Both compute in f32 on the CPU, on a small
made-up Qwen2 and a tokenizer that is trained here. The imported file is changed in one place alone: the adapter's first values, which every
program draws otherwise, are those of the other tool (`adapter: begin`). Ends with 1 where a loss differs by more than 1e-4.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIPELINE = os.environ.get("PIPELINE", ROOT / "target/release/pipeline")
BOUND = 1e-4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Words of any language will do; the responses differ in length, so that means of means would show.
WORDS = "the river carries cold water past old stone mills where people once ground corn and rye for bread".split()
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def main():
    worst = 0.0
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            make_model(folder / "model")
            make_rows(folder / "rows.jsonl")
            theirs = {"torchtune": torchtune, "axolotl": axolotl}[name](folder)
            ours = imported(folder)
        print(f"{name}\n step    theirs      ours        difference")
        for step, (one, other) in enumerate(zip(theirs, ours, strict=True), 1):
            print(f" {step:4}  {one:.6f}  {other:.6f}  {abs(one - other):.1e}")
            worst = max(worst, abs(one - other))
    print(f"largest difference {worst:.1e}, bound {BOUND:.0e}")
    sys.exit(worst > BOUND)


def make_rows(path):
    """31 rows: neither micro-batches nor steps come out even."""
    with open(path, "w") as file:
        for number in range(31):
            take = lambda start, count: " ".join(WORDS[(number * 7 + start + i) % len(WORDS)] for i in range(count))
            row = {"instruction": take(0, 3 + number % 5), "input": take(2, 4) if number % 3 else "", "output": take(5, 1 + number % 11)}
            file.write(json.dumps(row) + "\n")


def make_model(folder):
    """A Qwen2 with random weights, its tokenizer as `tokenizer.json` and as the `vocab.json` and `merges.txt` that torchtune reads."""
    import torch
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN2), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3 + ["### Instruction: ### Response: Below is an instruction"], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    added = [{"id": number, "content": token} for token, number in ids.items()]
    (folder / "special.json").write_text(json.dumps({"added_tokens": added}))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    shape = {"vocab_size": tokenizer.get_vocab_size(), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False}
    config = Qwen2Config(**shape, rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    config.eos_token_id = config.bos_token_id = ids["<|endoftext|>"]
    model = Qwen2ForCausalLM(config)
    # Larger than a fresh model's, so that its losses are those of its rows.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.08)
    model.save_pretrained(folder)
    path = folder / "config.json"
    saved = json.loads(path.read_text())
    saved["rope_theta"] = saved.pop("rope_parameters")["rope_theta"]
    path.write_text(json.dumps(saved))


def torchtune(folder):
    """torchtune's own recipe. With a learning rate of 0 it saves an adapter with its first values."""
    from importlib.util import find_spec

    recipe = Path(find_spec("recipes").submodule_search_locations[0]) / "lora_finetune_single_device.py"

    def run(rate, output):
        path = folder / ("config.yaml" if rate else "first.yaml")
        path.write_text(torchtune_config(folder, rate, folder / output))
        ran = subprocess.run([sys.executable, recipe, "--config", path], capture_output=True, text=True)
        if ran.returncode:
            sys.exit(ran.stderr)
        [log] = (folder / output / "logs").glob("log_*.txt")
        lines = [dict(word.split(":") for word in line.split("|")[1].split()) for line in log.read_text().splitlines()]
        return [float(line["loss"]) for line in lines]

    run(0.0, "first")
    losses = run(3e-3, "out")
    begin = folder / "begin"
    begin.mkdir()
    [saved] = (folder / "first").glob("epoch_0")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (begin / name).write_bytes((saved / name).read_bytes())
    return losses


def torchtune_config(folder, rate, output):
    config = json.loads((folder / "model/config.json").read_text())
    return f"""
output_dir: {output}
tokenizer:
  _component_: torchtune.models.qwen2.qwen2_tokenizer
  path: {folder}/model/vocab.json
  merges_file: {folder}/model/merges.txt
  special_tokens_path: {folder}/model/special.json
  max_seq_len: null
model:
  _component_: torchtune.models.qwen2.lora_qwen2
  lora_attn_modules: [q_proj, v_proj, output_proj]
  apply_lora_to_mlp: True
  apply_lora_to_output: False
  vocab_size: {config["vocab_size"]}
  num_layers: 2
  num_heads: 4
  num_kv_heads: 2
  embed_dim: 64
  intermediate_dim: 128
  max_seq_len: 512
  attn_dropout: 0.0
  norm_eps: 1e-6
  rope_base: 1000000.0
  lora_rank: 8
  lora_alpha: 16
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: {folder}/model
  checkpoint_files: [model.safetensors]
  recipe_checkpoint: null
  output_dir: ${{output_dir}}
  model_type: QWEN2
resume_from_checkpoint: False
save_adapter_weights_only: True
dataset:
  _component_: torchtune.datasets.instruct_dataset
  source: json
  data_files: {folder}/rows.jsonl
  column_map: {{input: instruction, output: output}}
  train_on_input: False
  packed: False
seed: 1
shuffle: False
batch_size: 2
epochs: 2
max_steps_per_epoch: 5
gradient_accumulation_steps: 3
optimizer: {{_component_: torch.optim.AdamW, fused: False, weight_decay: 0.01, lr: {rate}}}
lr_scheduler: {{_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 2}}
loss: {{_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}}
clip_grad_norm: 1.0
compile: False
metric_logger: {{_component_: torchtune.training.metric_logging.DiskLogger, log_dir: "${{output_dir}}/logs"}}
log_every_n_steps: 1
log_peak_memory_stats: False
device: cpu
dtype: fp32
enable_activation_checkpointing: False
enable_activation_offloading: False
profiler: {{_component_: torchtune.training.setup_torch_profiler, enabled: False}}
"""


AXOLOTL = """base_model: {folder}/model
datasets:
  - path: {folder}/rows.jsonl
    type: alpaca
output_dir: {folder}/out
adapter: lora
sequence_len: 256
lora_r: 8
lora_alpha: 16
lora_dropout: 0.0
lora_target_linear: true
gradient_accumulation_steps: 3
micro_batch_size: 2
num_epochs: 2
curriculum_sampling: true
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 0.003
warmup_steps: 2
weight_decay: 0.01
bf16: false
fp16: false
"""


def axolotl(folder):
    """What axolotl 0.19 does with this configuration: its alpaca prompts, PEFT, and transformers' Trainer."""
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

    (folder / "config.yaml").write_text(AXOLOTL.format(folder=folder))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    head = "Below is an instruction that describes a task"
    tail = "Write a response that appropriately completes the request.\n\n### Instruction:\n"

    def encoded(row):
        if row["input"]:
            lead = f"{head}, paired with an input that provides further context. {tail}{row['instruction']}\n\n### Input:\n{row['input']}"
        else:
            lead = f"{head}. {tail}{row['instruction']}"
        prompt = tokenizer(lead + "\n\n### Response:\n", add_special_tokens=False).input_ids
        answer = tokenizer(row["output"], add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
        return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}

    rows = [encoded(json.loads(line)) for line in open(folder / "rows.jsonl")]
    torch.manual_seed(42)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM"))
    model.save_pretrained(folder / "begin")

    class Sequential(Trainer):
        def _get_train_sampler(self, dataset=None):
            return SequentialSampler(self.train_dataset)

    arguments = TrainingArguments(
        output_dir=folder / "out",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        num_train_epochs=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        weight_decay=0.01,
        optim="adamw_torch",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    collator = DataCollatorForSeq2Seq(tokenizer, padding=True)
    trainer = Sequential(model=model, args=arguments, train_dataset=rows, data_collator=collator)
    trainer.train()
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def imported(folder):
    """The losses of the imported file, which goes on from the other tool's first values."""
    file = folder / "imported.yaml"
    subprocess.run([PIPELINE, "import", folder / "config.yaml", "-o", file], check=True, cwd=folder, stderr=subprocess.DEVNULL)
    text = file.read_text()
    begin = "  begin: { uses: download, with: { path: ./begin, as: adapter } }\n"
    text = text.replace("stages:\n", f"stages:\n{begin}", 1).replace("      method: lora\n", "      adapter: begin\n      method: lora\n", 1)
    head, _, _ = text.partition("publish:\n")
    file.write_text(head + "publish: { adapter.metrics: ./metrics }\n")
    environment = os.environ | {"PIPELINE_HOME": str(folder / "home")}
    ran = subprocess.run([PIPELINE, "run", file], cwd=folder, env=environment, capture_output=True, text=True)
    if ran.returncode:
        sys.exit(f"{text}\n{ran.stdout}{ran.stderr}")
    lines = [json.loads(line) for line in (folder / "metrics/metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


if __name__ == "__main__":
    main()
