#!/usr/bin/env python3
"""llama.cpp reads what the stage kind `gguf` writes: ids of texts, and log-probabilities of next tokens.

    python3 -m venv peer && peer/bin/pip install xllamacpp tokenizers torch transformers
    cargo build --release
    peer/bin/python scripts/check_gguf.py [--texts 1000] [--prompts 40] [--only MODEL …]

The models are that of `pipelines/quickstart_gguf.yaml`, which is trained; those of `tests/golden/gguf`, whose weights are random, also without
their `tokenizer.model`; and some more of that sort. Of each, in f32:

- the ids of 1000 texts (pieces of the quickstart's, and letters of many scripts at random) are those of `tokenizer.json`;
- the log-probabilities of all tokens after each prompt are those of transformers to 1e-4, with a cache in f32, as llama.cpp's own in f16 costs 3e-3.
  The gemmas have 5e-3: ggml takes GELU from a table in f16. Prompts fit in the window where llama.cpp has none, and are
  longer than the short factors of longrope last. Prompts after which llama.cpp gives
  no probabilities (it came to no whole letter) are counted.

And in Q8_0, which llama.cpp rounds activations to as well: of a model with random weights no log-probability is further off than 0.35; of the trained
one the most probable token is the same after 99 of 100 prefixes of its text. The mixture of 4 and 6 bits has to load, and to answer.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/reference"))

from make_golden_gguf import LONGROPE, YARN, write_checkpoint  # noqa: E402

PIPELINE = Path(os.environ.get("PIPELINE", ROOT / "target/release/pipeline"))
GOLDEN = Path(os.environ.get("PIPELINE_GOLDEN_DIR", ROOT / "tests/golden")) / "gguf"
QUICKSTART = ROOT / "pipelines/quickstart_gguf.yaml"
LETTERS = "abc XYZ 0123456789 .,!?'\"\n\t-_()éüñ中文字ßåøж👍🏽  "
BOUND, GEMMA_BOUND, Q8_0_BOUND = 1e-4, 5e-3, 0.35
LEAST_AGREEMENT = 0.99
CONTEXT = 256


@dataclass
class Model:
    """A checkpoint with its tokenizer, and how far llama.cpp computes it."""

    name: str
    folder: Path
    is_trained: bool = False
    files: dict = field(default_factory=dict)
    bound: float = BOUND
    shortest_prompt: int = 1
    longest_prompt: int = 120

    def __post_init__(self):
        config = json.loads((self.folder / "config.json").read_text())
        family = config["model_type"]
        if family.startswith("gemma"):
            self.bound = GEMMA_BOUND
        if family in ("mistral", "phi3") and config.get("sliding_window"):
            self.longest_prompt = config["sliding_window"]
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        # llama.cpp goes by its context, and the model by the length of the text.
        if (
            scaling.get("rope_type", scaling.get("type")) == "longrope"
            and config["original_max_position_embeddings"] < CONTEXT
        ):
            self.shortest_prompt = config["original_max_position_embeddings"] + 1


class Peer:
    """llama.cpp's server over a file."""

    def __init__(self, file):
        import xllamacpp

        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(file)
        parameters.n_ctx = CONTEXT
        parameters.n_parallel = 1
        parameters.warmup = False
        parameters.cpuparams.n_threads = 2
        parameters.port = 0
        f32 = xllamacpp.ggml_type.GGML_TYPE_F32
        parameters.cache_type_k, parameters.cache_type_v, parameters.flash_attn_type = f32, f32, 0
        self.server = xllamacpp.Server(parameters)

    def ask(self, path, body):
        request = urllib.request.Request(
            self.server.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def ids(self, text):
        return self.ask("/tokenize", {"content": text, "add_special": False, "parse_special": False})["tokens"]

    def next_tokens(self, ids, count):
        """The most probable tokens after these, with their log-probabilities."""
        body = {"prompt": ids, "n_predict": 1, "n_probs": count, "temperature": 1.0, "seed": 1, "samplers": []}
        found = self.ask("/completion", body).get("completion_probabilities")
        return [(token["id"], token["logprob"]) for token in found[0]["top_logprobs"]] if found else None


def rows():
    lines = (ROOT / "pipelines/quickstart/text.jsonl").read_text().splitlines()
    return [next(iter(json.loads(line).values())) for line in lines]


def texts(count):
    draw = random.Random(0)
    whole = rows()
    found = []
    while len(found) < count:
        text = draw.choice(whole)
        begin = draw.randrange(len(text))
        piece = text[begin : begin + draw.randrange(1, 80)]
        found.append(piece if draw.random() < 0.5 else "".join(draw.choices(LETTERS, k=draw.randrange(1, 40))))
    return found


HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
# Of each: the class, the golden model whose tokenizer it has, and what its configuration says beside the sizes.
SHAPES = {
    "llama_yarn": ("llama", "llama31", {"rope_parameters": YARN}),
    "qwen2_tied": ("qwen2", "qwen3", {"tie_word_embeddings": True}),
    "phi3_no_window": ("phi3", "phi3", {"sliding_window": None}),
    "phi3_partial_rotary": ("phi3", "phi3", {"rope_parameters": HALF}),
    "phi3_longrope_short": ("phi3", "phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": CONTEXT}),
}


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2 * CONTEXT,
}


def random_model(folder, name):
    kind, tokenizer, more = SHAPES[name]
    write_checkpoint(folder / name, GOLDEN / tokenizer, kind, {**SIZES, **more})
    return Model(name, folder / name)


def models(folder):
    """All but the one that the quickstart trains."""
    for source in sorted(path for path in GOLDEN.iterdir() if path.is_dir()):
        yield Model(source.name, source)
        if (source / "tokenizer.model").exists():
            bare = folder / f"{source.name}_bare"
            shutil.copytree(source, bare, ignore=shutil.ignore_patterns("tokenizer.model", "*.gguf"))
            yield Model(bare.name, bare)
    for name in SHAPES:
        yield random_model(folder, name)


def write(folder, chosen):
    """Files of the models in f32 and Q8_0, by one run."""
    stages, published = {}, {}
    for model in chosen:
        stages[model.name] = {"uses": "download", "with": {"path": str(model.folder)}}
        for kind in ("f32", "q8_0"):
            stage = f"{model.name}_{kind}"
            stages[stage] = {"uses": "gguf", "with": {"model": model.name, "type": kind, "name": model.name}}
            published[stage] = f"./files/{stage}"
            model.files[kind] = folder / "files" / stage / "model.gguf"
    file = folder / "models.yaml"
    file.write_text(json.dumps({"version": 1, "name": "models", "stages": stages, "publish": published}))
    subprocess.run([PIPELINE, "--home", folder / "home", "-q", "run", file], check=True)


def quickstart(folder):
    """The model that the quickstart trains, with its files, and that of 4 and 6 bits."""
    run = [PIPELINE, "--home", folder / "home", "-q"]
    for output in ("whole", "middle", "small"):
        subprocess.run([*run, "run", QUICKSTART, "--until", output], check=True)
    for output, name in (("whole", "whole"), ("middle", "middle"), ("small", "small"), ("taught.model", "model")):
        subprocess.run([*run, "export", QUICKSTART, output, folder / "quickstart" / name], check=True)
    folder = folder / "quickstart"
    files = {
        "f32": folder / "whole/model.gguf",
        "q8_0": folder / "middle/model.gguf",
        "q4_k_m": folder / "small/model.gguf",
    }
    return Model("quickstart", folder / "model", is_trained=True, files=files)


class Reference:
    """transformers, in f32."""

    def __init__(self, folder):
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.vocabulary = self.model.config.vocab_size

    def log_probabilities(self, ids):
        """After each prefix of them."""
        with self.torch.no_grad():
            return self.torch.log_softmax(self.model(self.torch.tensor([ids])).logits[0].double(), -1)


def furthest(peer, reference, prompts):
    """The largest difference of a log-probability, how many were compared, and after how many prompts there was none."""
    largest, compared, silent = 0.0, 0, 0
    for prompt in prompts:
        found = peer.next_tokens(prompt, reference.vocabulary)
        if found is None:
            silent += 1
            continue
        expected = reference.log_probabilities(prompt)[-1]
        largest = max(largest, *(abs(expected[token].item() - value) for token, value in found))
        compared += len(found)
    return largest, compared, silent


def agreement(peer, reference, tokenizer, count):
    """After what part of so many prefixes of the text the most probable token is the same."""
    same, asked = 0, 0
    for text in rows():
        ids = tokenizer.encode(text, add_special_tokens=False).ids[:100]
        expected = reference.log_probabilities(ids).argmax(-1).tolist()
        for end in range(1, len(ids) + 1):
            found = peer.next_tokens(ids[:end], 1)
            if found is not None:
                asked += 1
                same += found[0][0] == expected[end - 1]
            if asked == count:
                return same / asked, asked
    return same / max(asked, 1), asked


def check(model, written, prompts):
    """A line of what was found, and whether it is as it should be."""
    from tokenizers import Tokenizer

    reference, tokenizer = Reference(model.folder), Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    peer = Peer(model.files["f32"])
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in written]
    other = [text for text, own in zip(written, ids, strict=True) if peer.ids(text) != own]
    long_enough = (own[: model.longest_prompt] for own in ids if len(own) >= model.shortest_prompt)
    asked = [prompt for prompt, _ in zip(long_enough, range(prompts), strict=False)]
    largest, compared, silent = furthest(peer, reference, asked)
    said = [
        f"{len(written) - len(other)} of {len(written)} texts have the same ids"
        + (f", not {other[:3]}" if other else ""),
        f"{compared} log-probabilities within {largest:.1e} (bound {model.bound:.0e}; {silent} of {len(asked)} prompts without)",
    ]
    right = not other and compared > 0 and largest <= model.bound
    rounded = Peer(model.files["q8_0"])
    if model.is_trained:
        part, positions = agreement(rounded, reference, tokenizer, 1000)
        said.append(f"Q8_0: the same first token after {100 * part:.1f} % of {positions} prefixes")
        right &= part >= LEAST_AGREEMENT and positions > 0
    else:
        apart, _, _ = furthest(rounded, reference, asked)
        said.append(f"Q8_0 within {apart:.2f}")
        right &= apart <= Q8_0_BOUND
    if "q4_k_m" in model.files:
        answer = Peer(model.files["q4_k_m"]).ask(
            "/completion", {"prompt": written[0], "n_predict": 8, "ignore_eos": True}
        )
        said.append(f"Q4_K_M goes on with {answer['content']!r}")
    return "; ".join(said), right


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--only", nargs="+", metavar="MODEL")
    arguments = parser.parse_args()
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        is_wanted = lambda name: not arguments.only or name in arguments.only  # noqa: E731
        chosen = [model for model in models(folder / "models") if is_wanted(model.name)]
        if chosen:
            write(folder, chosen)
        if is_wanted("quickstart"):
            chosen.append(quickstart(folder))
        for model in chosen:
            said, right = check(model, texts(arguments.texts), arguments.prompts)
            print(f"{model.name}: {said}{'' if right else '  WRONG'}", flush=True)
            if not right:
                wrong.append(model.name)
    print(
        f"{len(chosen)} models, {len(wrong)} wrong: {', '.join(wrong)}"
        if wrong
        else f"{len(chosen)} models, none wrong"
    )
    sys.exit(bool(wrong) or not chosen)


if __name__ == "__main__":
    main()
