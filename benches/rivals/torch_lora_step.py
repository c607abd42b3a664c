"""Times training steps of a Llama with random weights in PyTorch, transformers and PEFT, on the CPU.

The rival of `cargo bench -p model --bench lora_step`, with its arguments and one line of JSON as it prints. Run by
`benches/lora_step.py` and `benches/qlora.py`. `--quantize nf4` holds the linear layers but the head in 4 bits, by bitsandbytes.
"""

import argparse
import json
import os
import statistics
import threading
import time

arguments = argparse.ArgumentParser()
for name, default in {
    "hidden": 576, "layers": 30, "heads": 9, "kv-heads": 3, "intermediate": 1536, "vocab": 49152,
    "seq": 512, "batch": 1, "rank": 8, "threads": 2, "steps": 5, "warmup": 2,
}.items():
    arguments.add_argument(f"--{name}", type=int, default=default)
arguments.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
arguments.add_argument("--targets", default="q_proj,v_proj")
arguments.add_argument("--trained", choices=["adapter", "weights"], default="adapter")
arguments.add_argument("--recompute", choices=["none", "layers"], default="none")
arguments.add_argument("--quantize", choices=["nf4"])
arguments.add_argument("--compile", action="store_true")
arguments = arguments.parse_args()

os.environ.setdefault("OMP_NUM_THREADS", str(arguments.threads))
# Threads that wait by spinning would count as work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

torch.set_num_threads(arguments.threads)
torch.manual_seed(0)


def quantized(model):
    """The model with its linear layers in NF4, which is what `load_in_4bit` of transformers makes of them."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for path, linear in list(model.named_modules()):
        if not isinstance(linear, torch.nn.Linear) or path == "lm_head":
            continue
        made = Linear4bit(linear.in_features, linear.out_features, linear.bias is not None, torch.bfloat16, device="meta")
        made.weight = Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", module=made).to("cpu")
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, made)
    model.is_loaded_in_4bit = True
    return model


def build():
    """The model, ready to train."""
    if arguments.dtype == "bf16":
        torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=arguments.hidden,
            num_hidden_layers=arguments.layers,
            num_attention_heads=arguments.heads,
            num_key_value_heads=arguments.kv_heads,
            intermediate_size=arguments.intermediate,
            vocab_size=arguments.vocab,
            tie_word_embeddings=True,
            max_position_embeddings=max(8192, arguments.seq),
            attn_implementation="sdpa",
            use_cache=False,
        )
    )
    torch.set_default_dtype(torch.float32)
    if arguments.quantize:
        model = quantized(model)
    if arguments.trained == "adapter":
        from peft import LoraConfig, get_peft_model

        targets = arguments.targets if arguments.targets == "all-linear" else arguments.targets.split(",")
        model = get_peft_model(
            model, LoraConfig(r=arguments.rank, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
        )
    if arguments.recompute == "layers":
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    return model.train()


class Memory(threading.Thread):
    """The most anonymous memory of this process from now on."""

    def __init__(self):
        super().__init__(daemon=True)
        self.peak = 0

    def run(self):
        while True:
            with open("/proc/self/status", encoding="utf-8") as status:
                line = next(line for line in status if line.startswith("RssAnon:"))
            self.peak = max(self.peak, int(line.split()[1]) / 1024)
            time.sleep(0.02)


def main():
    model = build()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    ids = torch.randint(0, arguments.vocab, (arguments.batch, arguments.seq))
    run = torch.compile(model) if arguments.compile else model
    memory = Memory()
    memory.start()
    wall, cpu, losses = [], [], []
    for number in range(arguments.warmup + arguments.steps):
        began, processor = time.perf_counter(), time.process_time()
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if number >= arguments.warmup:
            wall.append(time.perf_counter() - began)
            cpu.append(time.process_time() - processor)
    import transformers

    tokens = arguments.seq * arguments.batch
    print(json.dumps({
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "tokens_per_s": tokens / statistics.median(wall),
        "seconds_per_step": statistics.median(wall),
        "cpu_seconds_per_step": statistics.median(cpu),
        "peak_anonymous_mib": memory.peak,
        "losses": losses,
    }))


main()
