#!/usr/bin/env python3
"""What writing a GGUF file costs: the stage `gguf`, and llama.cpp's quantiser on the same file of bf16.

    python3 -m venv rivals && rivals/bin/pip install llama-cpp-python==0.3.36
    RIVAL_PYTHON=rivals/bin/python python3 benches/gguf.py [--layers 8] [--rounds 3]

Makes a model of random weights, writes it in bf16, reads that file back as a model, and writes each type from it. Prints a Markdown table: the least
processor seconds of the rounds, with all that a stage does beside (reading its input, digests, the store), and the bytes of bf16 read for each of them.
The quantiser is measured as a process. Without it its columns stay empty. Needs nothing from the network.
"""

import argparse
import json
import resource
import tempfile
from pathlib import Path

import measure

# Type, and what llama.cpp calls it.
TYPES = {"q8_0": "Q8_0", "q4_0": "Q4_0", "q4_k_m": "Q4_K_M", "q5_k_m": "Q5_K_M", "q6_k": "Q6_K"}
QUANTISE = """
import ctypes, sys, llama_cpp
parameters = llama_cpp.llama_model_quantize_default_params()
parameters.ftype, parameters.nthread = getattr(llama_cpp, 'LLAMA_FTYPE_MOSTLY_' + sys.argv[3]), 2
assert llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(parameters)) == 0
"""


def ours(folder, name, stages, publish):
    """Runs stages, in a home of their own; the processor seconds of each."""
    (folder / name).write_text(json.dumps({"version": 1, "name": "gguf", "stages": stages, "publish": publish}))
    home = ["--home", str(folder / f"home_{name}")]
    measure.run([measure.pipeline(), "run", name, "--jobs", "1", "--overwrite", "-q", *home], cwd=folder)

    def spent(stage):
        shown = measure.run([measure.pipeline(), "runs", "show", "latest", stage, "--format", "json", *home], cwd=folder)
        return json.loads(shown.output)["how"]["cpu_seconds"]

    return {stage: spent(stage) for stage in stages}


def theirs(python, source, target, kind):
    """The processor seconds of llama.cpp's quantiser."""

    def spent():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = spent()
    measure.run([python, "-c", QUANTISE, str(source), str(target), kind])
    return spent() - before


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    python = measure.python_with("llama_cpp")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.jsonl").write_text((measure.ROOT / "pipelines/quickstart/text.jsonl").read_text())
        shape = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": arguments.layers, "num_attention_heads": 16}
        stages = {
            "text": {"uses": "dataset", "with": {"source": "./text.jsonl"}},
            "fresh": {"uses": "new_model", "with": {"text": "text", "vocab_size": 500, **shape}},
            "bf16": {"uses": "gguf", "with": {"model": "fresh", "type": "bf16", "pre_tokenizer": "gpt-2"}},
        }
        ours(folder, "make.yaml", stages, {"bf16": "./bf16"})
        source = folder / "bf16/model.gguf"
        stages = {"model": {"uses": "download", "with": {"path": str(source), "pre_tokenizer": "gpt-2"}}}
        stages |= {kind: {"uses": "gguf", "with": {"model": "model", "type": kind, "pre_tokenizer": "gpt-2"}} for kind in TYPES}
        size, least = source.stat().st_size, {}
        for at in range(arguments.rounds):
            found = ours(folder, f"write_{at}.yaml", stages, {})
            for kind, called in TYPES.items():
                pair = [found[kind], theirs(python, source, folder / "theirs.gguf", called) if python else float("nan")]
                least[kind] = [min(one, other) for one, other in zip(pair, least.get(kind, pair), strict=True)]
    print(f"{size / 1e9:.2f} GB of bf16\n\n| type | CPU-s | GB/s a core | llama.cpp, CPU-s | its to ours |\n|---|---|---|---|---|")
    for kind, (own, other) in least.items():
        print(f"| `{kind}` | {own:.2f} | {size / own / 1e9:.2f} | {other:.2f} | {other / own:.2f} |")


if __name__ == "__main__":
    main()
