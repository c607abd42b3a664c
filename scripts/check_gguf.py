#!/usr/bin/env python3
"""llama.cpp reads what the stage kind `gguf` writes: ids of texts, and log-probabilities of next tokens.

    python3 -m venv peer && peer/bin/pip install xllamacpp tokenizers torch transformers
    cargo build --release
    peer/bin/python scripts/check_gguf.py [--texts 1000] [--prompts 40]

Runs `pipelines/quickstart_gguf.yaml` and opens its file in f32 with llama.cpp. The ids of 1000 texts (pieces of the quickstart's, and letters of
many scripts at random) are to be those of `tokenizer.json`; the ten largest log-probabilities after each prompt those of transformers to 1e-4, with
a cache in f32, as llama.cpp's own in f16 costs 3e-3. Prompts after which llama.cpp gives no probabilities (it came to no whole letter) are counted.
The mixture of 4 and 6 bits has to load, and to answer.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIPELINE = Path(os.environ.get("PIPELINE", ROOT / "target/release/pipeline"))
FILE = ROOT / "pipelines/quickstart_gguf.yaml"
LETTERS = "abc XYZ 0123456789 .,!?'\"\n\t-_()éüñ中文字ßåøж👍🏽  "
BOUND = 1e-4
LONGEST_PROMPT = 40


class Peer:
    """llama.cpp's server over a file."""

    def __init__(self, file):
        import xllamacpp

        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(file)
        parameters.n_ctx = 256
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

    def next_tokens(self, ids):
        body = {"prompt": ids, "n_predict": 1, "n_probs": 10, "temperature": 1.0, "seed": 1, "samplers": []}
        found = self.ask("/completion", body).get("completion_probabilities")
        return [(token["id"], token["logprob"]) for token in found[0]["top_logprobs"]] if found else None


def texts(count):
    draw = random.Random(0)
    rows = [json.loads(line) for line in (ROOT / "pipelines/quickstart/text.jsonl").read_text().splitlines()]
    whole = [next(iter(row.values())) for row in rows]
    found = []
    while len(found) < count:
        text = draw.choice(whole)
        begin = draw.randrange(len(text))
        piece = text[begin : begin + draw.randrange(1, 80)]
        found.append(piece if draw.random() < 0.5 else "".join(draw.choices(LETTERS, k=draw.randrange(1, 40))))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=40)
    arguments = parser.parse_args()
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        run = [PIPELINE, "--home", folder / "home", "-q"]
        subprocess.run([*run, "run", FILE, "--until", "whole"], check=True)
        subprocess.run([*run, "run", FILE, "--until", "small"], check=True)
        for output, name in (("whole", "whole"), ("small", "small"), ("taught.model", "model")):
            subprocess.run([*run, "export", FILE, output, folder / name], check=True)
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
        tokenizer = Tokenizer.from_file(str(folder / "model/tokenizer.json"))
        peer = Peer(folder / "whole/model.gguf")
        written = texts(arguments.texts)
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in written]
        other = [text for text, own in zip(written, ids, strict=True) if peer.ids(text) != own]
        print(f"{len(written)} texts, {len(other)} with other ids: {other[:3]}")
        furthest, compared, silent = 0.0, 0, 0
        for prompt in (own[:LONGEST_PROMPT] for own in ids[: arguments.prompts]):
            found = peer.next_tokens(prompt)
            if found is None:
                silent += 1
                continue
            with torch.no_grad():
                expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1].double(), -1)
            furthest = max(furthest, *(abs(expected[token].item() - value) for token, value in found))
            compared += len(found)
        print(f"{compared} log-probabilities, the furthest {furthest:.1e} apart; {silent} prompts without")
        small = Peer(folder / "small/model.gguf").ask("/completion", {"prompt": written[0], "n_predict": 8, "ignore_eos": True})
        print(f"q4_k_m goes on with {small['content']!r}")
    sys.exit(bool(other) or furthest > BOUND or compared == 0)


if __name__ == "__main__":
    main()
