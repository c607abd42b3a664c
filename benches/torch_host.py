"""What a LoRA step costs the processor that hands operations to a device: the torch worker beside PyTorch with PEFT.

    target/python/bin/python benches/torch_host.py [--layers 16] [--dropout 0] [--rounds 30]

A model of Llama's layers, but of tensors so small that next to nothing is computed: what is left is Python, autograd and the
dispatch of operations, which bounds a step on a device that computes faster than it is given work. Every linear layer has an adapter
of rank 8, layers are computed again in the backward, in bf16 by autocast, one document. Both are in one process with one thread, a
step of each in turn; printed is the least CPU time of a step and its median. torch's own products are taken instead of oneDNN's,
which take tens of microseconds each to be set up on the processor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "workers" / "torch" / "src")]

import torch_pipe  # noqa: E402
from pipeline_torch_worker.data import Batch  # noqa: E402
from pipeline_torch_worker.device import open_device  # noqa: E402
from pipeline_torch_worker.job import read_job  # noqa: E402
from pipeline_torch_worker.parallel import Ranks  # noqa: E402
from pipeline_torch_worker.trainer import Trainer  # noqa: E402

VOCABULARY = 512
TOKENS = 8
WARM_UP = 3


class Worker:
    """The worker's trainer."""

    def __init__(self, root: Path, dropout: float) -> None:
        job = torch_pipe.job_of(root, root / "model", threads=1)
        changes = {"dtype": "bf16", "activation_checkpointing": True, "dropout": dropout}
        (root / "job.json").write_text(json.dumps({**job, **changes}))
        device = open_device("cpu", 0, 1)
        self._trainer = Trainer(read_job(root / "job.json"), device, Ranks.alone(device))
        ids = np.random.default_rng(0).integers(0, VOCABULARY, TOKENS + 1)
        self._batch = Batch.of_documents(ids[:-1], ids[1:], [TOKENS], np.zeros(1, np.int64))

    def step(self) -> None:
        self._trainer.accumulate([[self._batch]], TOKENS)
        self._trainer.step(torch_pipe.RATE)


class Peft:
    """The loop that `transformers` and PEFT give."""

    def __init__(self, root: Path, dropout: float) -> None:
        model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.bfloat16, attn_implementation="sdpa")
        config = LoraConfig(r=8, target_modules="all-linear", lora_dropout=dropout, task_type="CAUSAL_LM")
        self._model = get_peft_model(model, config)
        self._model.enable_input_require_grads()
        self._model.gradient_checkpointing_enable()
        self._model.train()
        self._trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=torch_pipe.RATE, fused=True)
        self._ids = torch.randint(0, VOCABULARY, (1, TOKENS))

    def step(self) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self._model(input_ids=self._ids, labels=self._ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    torch.backends.mkldnn.enabled = False
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=arguments.layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, tie_word_embeddings=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        LlamaForCausalLM(config).save_pretrained(root / "model")
        steps = {"worker": Worker(root, arguments.dropout).step, "PEFT": Peft(root, arguments.dropout).step}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(WARM_UP + arguments.rounds):
            for name, step in steps.items():
                began = time.thread_time()
                step()
                seconds[name].append(time.thread_time() - began)
    counted = f"{arguments.layers} layers, {TOKENS} tokens, {arguments.rounds} steps of each in turn"
    print(f"torch {torch.__version__}, {counted}")
    for what, of in (("least", min), ("median", statistics.median)):
        worker, peft = (1e3 * of(seconds[name][WARM_UP:]) for name in ("worker", "PEFT"))
        print(f"{what} CPU time of a step: {worker:.0f} ms of the worker, {peft:.0f} ms of PEFT: {worker / peft:.2f}x")


if __name__ == "__main__":
    main()
