"""Times greedy decoding of a Llama with random weights in llama.cpp, on the CPU.

The rival of `cargo bench -p model --bench decode`, with its arguments and one line of JSON like it prints. Run by
`benches/decode.py`. It writes a GGUF file into a temporary folder; `int8` are blocks of `q8_0`, and `int4` of `q4_0` with the
embedding, which is the head, in `q8_0`; `q4_k` and `q5_k` have it in `q6_k`.
"""

import argparse
import json
import os
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

arguments = argparse.ArgumentParser()
for name, default in {
    "hidden": 576, "layers": 30, "heads": 9, "kv-heads": 3, "intermediate": 1536, "vocab": 49152,
    "prompt": 64, "new": 128, "batch": 1, "threads": 2, "repetitions": 3,
}.items():
    arguments.add_argument(f"--{name}", type=int, default=default)
arguments.add_argument("--weights", choices=["f32", "bf16", "int8", "int4", "q4_k", "q5_k", "q6_k"], default="bf16")
arguments.add_argument("--extra-buffers", choices=["yes", "no"], default="yes", help="weights packed anew for this machine, AMX's among them")
arguments = arguments.parse_args()

# Threads that wait by spinning would count as work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import gguf  # noqa: E402
import llama_cpp  # noqa: E402
import numpy  # noqa: E402
from gguf import GGMLQuantizationType as Kind  # noqa: E402

KINDS = {
    "f32": (Kind.F32, Kind.F32), "bf16": (Kind.BF16, Kind.BF16), "int8": (Kind.Q8_0, Kind.Q8_0), "int4": (Kind.Q4_0, Kind.Q8_0),
    "q4_k": (Kind.Q4_K, Kind.Q6_K), "q5_k": (Kind.Q5_K, Kind.Q6_K), "q6_k": (Kind.Q6_K, Kind.Q6_K),
}
# Of K formats, which the package cannot quantise to: where a block has the numbers in f16 that its scales are multiplied with, and
# these. Then blocks of random bytes have values of mean zero and a deviation of about 0.02.
WHOLES = {Kind.Q4_K: {0: 8e-5, 2: 6e-4}, Kind.Q5_K: {0: 4e-5, 2: 6e-4}, Kind.Q6_K: {208: 1.5e-5}}
random = numpy.random.default_rng(0)


def write(path):
    """A model of random weights."""
    writer = gguf.GGUFWriter(path, "llama")
    head_dim = arguments.hidden // arguments.heads
    writer.add_context_length(8192)
    writer.add_embedding_length(arguments.hidden)
    writer.add_block_count(arguments.layers)
    writer.add_feed_forward_length(arguments.intermediate)
    writer.add_head_count(arguments.heads)
    writer.add_head_count_kv(arguments.kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(arguments.vocab)
    writer.add_tokenizer_model("no_vocab")
    of_layers, of_table = KINDS[arguments.weights]

    def matrix(name, rows, columns, kind=of_layers):
        writer.add_tensor(f"{name}.weight", blocks(rows, columns, kind), raw_dtype=kind)

    def norm(name):
        writer.add_tensor(f"{name}.weight", numpy.ones(arguments.hidden, dtype=numpy.float32))

    keys = arguments.kv_heads * head_dim
    matrix("token_embd", arguments.vocab, arguments.hidden, of_table)
    norm("output_norm")
    for layer in range(arguments.layers):
        block = f"blk.{layer}"
        norm(f"{block}.attn_norm")
        matrix(f"{block}.attn_q", arguments.hidden, arguments.hidden)
        matrix(f"{block}.attn_k", keys, arguments.hidden)
        matrix(f"{block}.attn_v", keys, arguments.hidden)
        matrix(f"{block}.attn_output", arguments.hidden, arguments.hidden)
        norm(f"{block}.ffn_norm")
        matrix(f"{block}.ffn_gate", arguments.intermediate, arguments.hidden)
        matrix(f"{block}.ffn_up", arguments.intermediate, arguments.hidden)
        matrix(f"{block}.ffn_down", arguments.hidden, arguments.intermediate)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def blocks(rows, columns, kind):
    """The bytes of random values."""
    if kind not in WHOLES:
        values = random.standard_normal((rows, columns), dtype=numpy.float32) * 0.02
        return gguf.quants.quantize(values, kind)
    of_block, size = gguf.GGML_QUANT_SIZES[kind]
    found = random.integers(0, 256, (rows * columns // of_block, size), dtype=numpy.uint8)
    for place, value in WHOLES[kind].items():
        found[:, place : place + 2] = numpy.frombuffer(numpy.float16(value).tobytes(), dtype=numpy.uint8)
    return found.reshape(rows, -1)


def load(path):
    """A context over the model."""
    llama_cpp.llama_log_set(quiet, None)
    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_default_params()
    parameters.use_extra_bufts = arguments.extra_buffers == "yes"
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = arguments.batch * max(256, arguments.prompt + arguments.new + 2)
    settings.n_batch = settings.n_ubatch = max(512, arguments.batch * arguments.prompt)
    settings.n_seq_max = arguments.batch
    settings.n_threads = settings.n_threads_batch = arguments.threads
    settings.no_perf = True
    return llama_cpp.llama_init_from_model(model, settings)


@llama_cpp.llama_log_callback
def quiet(_level, _text, _data):
    """Says nothing."""


def clock():
    return time.perf_counter(), time.process_time()


def decode(context, batch, tokens, position):
    """Appends tokens to every sequence from a position on; returns the most likely next token of each."""
    batch.n_tokens, last = 0, []
    for sequence, ids in enumerate(tokens):
        for offset, token in enumerate(ids):
            at = batch.n_tokens
            batch.token[at], batch.pos[at] = int(token), position + offset
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
            batch.logits[at] = offset == len(ids) - 1
            batch.n_tokens += 1
        last.append(batch.n_tokens - 1)
    if llama_cpp.llama_decode(context, batch) != 0:
        raise SystemExit("llama_decode failed")
    logits = [llama_cpp.llama_get_logits_ith(context, index) for index in last]
    return [[int(numpy.ctypeslib.as_array(row, (arguments.vocab,)).argmax())] for row in logits]


def run(context, batch, prompts):
    """The times at the start, after the prompts with the first tokens, and at the end."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    times = [clock()]
    tokens = decode(context, batch, prompts, 0)
    times.append(clock())
    for step in range(arguments.new):
        tokens = decode(context, batch, tokens, arguments.prompt + step)
    return [*times, clock()]


def main():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write(path)
        context = load(path)
        batch = llama_cpp.llama_batch_init(arguments.batch * arguments.prompt, 0, 1)
        prompts = random.integers(0, arguments.vocab, (arguments.batch, arguments.prompt)).tolist()
        run(context, batch, prompts)
        runs = [run(context, batch, prompts) for _ in range(arguments.repetitions)]

    def rates(phase, tokens, kind):
        found = sorted(tokens * arguments.batch / (times[phase + 1][kind] - times[phase][kind]) for times in runs)
        return [found[0], found[len(found) // 2], found[-1]]

    print(json.dumps({
        "versions": {"llama-cpp-python": version("llama-cpp-python")},
        "prefill_tokens_per_s": rates(0, arguments.prompt, 0),
        "decode_tokens_per_s": rates(1, arguments.new, 0),
        "decode_tokens_per_cpu_s": rates(1, arguments.new, 1)[1],
    }))


main()
