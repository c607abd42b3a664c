"""Times greedy decoding of a Llama with random weights in PyTorch and transformers, on the CPU.

The rival of `cargo bench -p model --bench decode`, with its arguments and one line of JSON like it prints. Run by
`benches/decode.py`. `rawloop` calls the model token by token over its cache, without `generate()`.
"""

import argparse
import json
import os
import time

arguments = argparse.ArgumentParser()
for name, default in {
    "hidden": 576, "layers": 30, "heads": 9, "kv-heads": 3, "intermediate": 1536, "vocab": 49152,
    "prompt": 64, "new": 128, "batch": 1, "threads": 2, "repetitions": 3,
}.items():
    arguments.add_argument(f"--{name}", type=int, default=default)
arguments.add_argument("--weights", choices=["f32", "bf16"], default="bf16")
arguments.add_argument("--loop", choices=["rawloop", "generate"], default="rawloop")
arguments = arguments.parse_args()

os.environ.setdefault("OMP_NUM_THREADS", str(arguments.threads))
# Threads that wait by spinning would count as work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

torch.set_num_threads(arguments.threads)
torch.manual_seed(0)


def build():
    """The model, ready to be asked."""
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=arguments.hidden,
            num_hidden_layers=arguments.layers,
            num_attention_heads=arguments.heads,
            num_key_value_heads=arguments.kv_heads,
            intermediate_size=arguments.intermediate,
            vocab_size=arguments.vocab,
            tie_word_embeddings=True,
            max_position_embeddings=8192,
            attn_implementation="sdpa",
        )
    )
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model.to(torch.bfloat16 if arguments.weights == "bf16" else torch.float32).eval()


def clock():
    return time.perf_counter(), time.process_time()


def rawloop(model, ids):
    """The times at the start, after the prompts with the first tokens, and at the end."""
    times = [clock()]
    output = model(ids, use_cache=True, logits_to_keep=1)
    token = output.logits[:, -1:].argmax(-1)
    times.append(clock())
    for _ in range(arguments.new):
        output = model(token, past_key_values=output.past_key_values, use_cache=True)
        token = output.logits[:, -1:].argmax(-1)
    return [*times, clock()]


def generate(model, ids):
    """As `rawloop`; what a single new token takes is the prefill."""
    times = [clock()]
    model.generate(ids, max_new_tokens=1, do_sample=False)
    first = clock()
    length = 1 + arguments.new
    model.generate(ids, max_new_tokens=length, min_new_tokens=length, do_sample=False)
    end = clock()
    prefill = [after - before for before, after in zip(times[0], first)]
    return [*times, first, tuple(moment - spent for moment, spent in zip(end, prefill))]


def main():
    model = build()
    ids = torch.randint(0, arguments.vocab, (arguments.batch, arguments.prompt))
    run = {"rawloop": rawloop, "generate": generate}[arguments.loop]
    with torch.inference_mode():
        run(model, ids)
        runs = [run(model, ids) for _ in range(arguments.repetitions)]

    def rates(phase, tokens, kind):
        found = sorted(tokens * arguments.batch / (times[phase + 1][kind] - times[phase][kind]) for times in runs)
        return [found[0], found[len(found) // 2], found[-1]]

    print(json.dumps({
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "prefill_tokens_per_s": rates(0, arguments.prompt, 0),
        "decode_tokens_per_s": rates(1, arguments.new, 0),
        "decode_tokens_per_cpu_s": rates(1, arguments.new, 1)[1],
    }))


main()
