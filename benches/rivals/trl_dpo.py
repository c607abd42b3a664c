"""TRL's DPOTrainer on the CPU, as `benches/preference.py` runs it.

`adapter FOLDER TARGETS` writes a fresh adapter of PEFT's for the model in it; `train JOB` trains it, and prints a line of JSON.
"""

import json
import os
import sys
import time
from pathlib import Path


def adapter(folder, targets):
    """FOLDER/adapter: random A, B of zeros."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=targets.split(","), task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(folder / "adapter")


def train(job):
    """One run; the seconds of each step, its tokens, and the losses."""
    os.environ["OMP_NUM_THREADS"] = str(job["threads"])
    # Threads that wait by spinning would count as work.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    import torch
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    torch.set_num_threads(job["threads"])
    folder = Path(job["folder"])
    seconds, tokens = [], []

    class Clock(TrainerCallback):
        """Times from the beginning of a step, before its rows are collated, to its end."""

        def on_step_begin(self, *_, **__):
            self.began = time.perf_counter()

        def on_step_end(self, *_, **__):
            seconds.append(time.perf_counter() - self.began)

    class Counted(DPOTrainer):
        """Counts the tokens of each batch."""

        def compute_loss(self, model, inputs, *rest, **named):
            tokens.append(int(inputs["attention_mask"].sum()))
            return super().compute_loss(model, inputs, *rest, **named)

    half = job["dtype"] == "bf16"
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16 if half else torch.float32)
    model = PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.pad_token = tokenizer.eos_token
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    trainer = Counted(
        model=model,
        args=DPOConfig(
            output_dir=str(folder / "trl"), use_cpu=True, bf16=half, per_device_train_batch_size=job["pairs"], max_steps=job["steps"],
            learning_rate=job["learning_rate"], lr_scheduler_type="constant", weight_decay=0.01, max_grad_norm=1.0, beta=job["beta"],
            max_length=job["max_length"], precompute_ref_log_probs=job["precomputed"], precompute_ref_batch_size=job["pairs"],
            gradient_checkpointing=False, train_sampling_strategy="sequential", logging_steps=1, report_to="none", save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses, norms = ([float(step[name]) for step in steps] for name in ("loss", "grad_norm"))
    print(json.dumps({"losses": losses, "grad_norms": norms, "tokens": tokens, "seconds": seconds}))


if __name__ == "__main__":
    if sys.argv[1] == "adapter":
        adapter(Path(sys.argv[2]), sys.argv[3])
    else:
        train(json.loads(sys.argv[2]))
