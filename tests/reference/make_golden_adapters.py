#!/usr/bin/env python3
"""Writes the reference results for adapters that make_golden.py has not: LoRA on the head, modules that are trained as a whole, patterns
of ranks and targets, DoRA on fused projections, and training that goes on from an adapter that PEFT wrote.

The models are make_golden.py's, and so is the way of training, with another seed for each case. Each case is one more folder
`<family>/lora/<variant>/` with the same files as the others.

    pip install torch transformers peft safetensors numpy
    PYTHONHASHSEED=0 python make_golden_adapters.py OUT_DIR [--only llama31/lm_head,phi3/dora]

OUT_DIR holds the folders that make_golden.py wrote. (The hash seed fixes the order in which PEFT lists target modules.)
"""
import argparse, pathlib
import numpy
import torch
from transformers import AutoModelForCausalLM
from make_golden import families, lora_case, randomise

ATTENTION = ["q_proj", "v_proj"]
PATTERNS = dict(
    r=4, lora_alpha=8, use_rslora=True,
    target_modules=r"model\.layers\.\d+\.(self_attn\.(q|o)_proj|mlp\.(up|down)_proj)",
    rank_pattern={r"layers\.1\.self_attn\..*_proj": 2, "down_proj": 6},
    alpha_pattern={r"^model\.layers\.0\.mlp\.up_proj": 3, "q_proj": 5},
)
FUSED = dict(
    r=4, lora_alpha=8, use_dora=True, target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    rank_pattern={"gate_up_proj": 3}, alpha_pattern={r"layers\.1\..*qkv_proj": 6},
)

# family, variant -> settings, clip, matrices kept beside those of layer 0
CASES = {
    ("llama31", "lm_head"): (dict(r=4, lora_alpha=8, target_modules=["q_proj", "lm_head"]), 0.65, ["lm_head"]),
    ("qwen2", "tied_lm_head"): (dict(r=4, lora_alpha=8, target_modules=["q_proj", "lm_head"]), 0.59, ["lm_head", "embed_tokens"]),
    ("gemma2", "dora_lm_head"): (dict(r=4, lora_alpha=8, use_dora=True, target_modules=["v_proj", "lm_head"]), 0.55, ["lm_head"]),
    ("llama31", "modules_to_save"): (
        dict(r=4, lora_alpha=8, target_modules=ATTENTION, modules_to_save=["embed_tokens", "lm_head"]), 3.6, ["lm_head", "embed_tokens"]),
    ("llama2", "norms"): (dict(r=4, lora_alpha=8, target_modules=ATTENTION, modules_to_save=["norm"]), 1.07, []),
    ("qwen2", "tied_lm_head_saved"): (
        dict(r=4, lora_alpha=8, target_modules=ATTENTION, modules_to_save=["lm_head", "k_proj"]), 2.08, ["lm_head", "embed_tokens"]),
    ("gemma", "tied_embedding_saved"): (
        dict(r=4, lora_alpha=8, target_modules=ATTENTION, modules_to_save=["embed_tokens"]), 2.42, ["lm_head", "embed_tokens"]),
    ("qwen3", "tied_both_saved"): (
        dict(r=4, lora_alpha=8, target_modules=ATTENTION, modules_to_save=["embed_tokens", "lm_head"]), 3.1, ["lm_head", "embed_tokens"]),
    ("llama31", "patterns"): (PATTERNS, 2.0, []),
    ("phi3", "dora"): (FUSED, 1.62, []),
    ("mistral", "layers"): (
        dict(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "down_proj"], layers_to_transform=[1], exclude_modules=["k_proj"]), 0.335, []),
    ("llama2", "dropout"): (dict(r=4, lora_alpha=8, lora_dropout=0.3, target_modules=ATTENTION + ["up_proj", "down_proj", "lm_head"]), 1.35, []),
    ("qwen2", "dora_dropout"): (dict(r=4, lora_alpha=8, lora_dropout=0.2, use_dora=True, target_modules=ATTENTION + ["o_proj", "down_proj"]), 1.385, []),
    ("llama31", "warm_start"): (dict(r=4, lora_alpha=8, target_modules=ATTENTION), 0.85, []),
    ("llama31", "lora_plus"): (dict(r=4, lora_alpha=8, use_dora=True, target_modules=ATTENTION + ["down_proj"]), 1.1, []),
    ("gemma2", "neftune"): (dict(r=4, lora_alpha=8, target_modules=ATTENTION), 0.5, []),
    ("llama31", "trainable_tokens"): (
        dict(r=4, lora_alpha=8, target_modules=ATTENTION,
             trainable_token_indices={"embed_tokens": list(range(300, 320)) + [7], "lm_head": list(range(310, 320))}), 0.9, ["lm_head", "embed_tokens"]),
    ("gemma2", "tied_trainable_tokens"): (
        dict(r=4, lora_alpha=8, target_modules=ATTENTION, trainable_token_indices=list(range(300, 320)) + [7]), 0.5, ["lm_head", "embed_tokens"]),
}
RATIO = {("llama31", "lora_plus"): 4.0}
NOISE = {("gemma2", "neftune"): 15.0}

def philox(counter, key):
    """Philox4x32-10 (Salmon et al., SC 2011) of arrays of 32-bit words held in 64."""
    low = numpy.uint64(0xFFFFFFFF)
    c, k = [numpy.asarray(word, dtype=numpy.uint64) for word in counter], [int(word) for word in key]
    for _ in range(10):
        first, second = c[0] * numpy.uint64(0xD2511F53), c[2] * numpy.uint64(0xCD9E8D57)
        c = [(second >> numpy.uint64(32)) ^ c[1] ^ numpy.uint64(k[0]), second & low,
             (first >> numpy.uint64(32)) ^ c[3] ^ numpy.uint64(k[1]), first & low]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c

def stream(seed, purpose, step, row, module, blocks):
    """The first blocks of an addressed stream of the project, four words each, as model/src/random.rs documents it."""
    low = 0xFFFFFFFF
    key = [seed & low, seed >> 32]
    m = [int(word) for word in philox([step & low, step >> 32, row & low, row >> 32], key)]
    n = [int(word) for word in philox([m[0] ^ purpose, m[1] ^ (module >> 32), m[2] ^ (module & low), m[3]], [key[0], key[1] ^ 1])]
    blocks = numpy.arange(blocks, dtype=numpy.uint64)
    words = philox([blocks, blocks >> numpy.uint64(32), n[2], n[3]], n[:2])
    return numpy.stack(numpy.broadcast_arrays(*words), -1).reshape(-1)

def embedding_noise(seed, step, ids, columns, alpha):
    """The project's NEFTune noise on a document of these tokens, [tokens, columns], as model/src/decoder/noise.rs documents it."""
    address = 0xCBF29CE484222325
    for byte in numpy.asarray(ids, dtype="<u4").tobytes(): address = ((address ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    count = len(ids) * columns
    words = stream(seed, 9, step, address, 0, -(-count // 4))[:count].astype(numpy.float64)
    limit = alpha / count ** 0.5    # transformers' mag_norm
    return torch.from_numpy((limit * (2 * words / 2**32 - 1)).astype(numpy.float32)).reshape(len(ids), columns)

def addressed_noise(model, alpha):
    """Hooks NEFTune onto the embedding as transformers does, with addressed noise for each document of a row."""
    told = {}
    def hook(module, arguments, output):
        if not module.training: return output
        documents = arguments[0][0].split(told["lens"])
        noise = [embedding_noise(0, told["step"], ids.numpy(), output.shape[-1], alpha) for ids in documents]
        return output + torch.cat(noise)[None]
    model.get_input_embeddings().register_forward_hook(hook)
    model.train()
    def tell(step, row, lens): told.update(step=step, lens=lens)
    return tell

def mask(seed, step, row, module, probability, tokens, columns):
    """The project's dropout mask of a module for the tokens of a row, [tokens, columns], as model/src/random.rs documents it."""
    name = 0xCBF29CE484222325
    for byte in module.encode(): name = ((name ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    words = stream(seed, 4, step, row, name, tokens * -(-columns // 4)).reshape(tokens, -1)[:, :columns]
    kept = words >= numpy.uint64(round(probability * 2**32))
    return torch.from_numpy(kept.astype(numpy.float32)) / (1 - probability)

class AddressedDropout(torch.nn.Module):
    """Dropout whose mask is drawn for a step and a row of the data instead of from a generator with a state."""
    def __init__(self, module, probability):
        super().__init__()
        self.module, self.probability, self.step, self.row = module, probability, 0, 0
    def forward(self, x):
        if not self.training: return x
        return x * mask(0, self.step, self.row, self.module, self.probability, x.shape[-2], x.shape[-1])

def addressed_dropout(model):
    """Puts addressed dropouts in the place of PEFT's, and returns the function that tells them the step and the row."""
    modules = {name: module for name, module in model.base_model.model.named_modules() if hasattr(module, "lora_dropout")}
    for name, module in modules.items():
        module.lora_dropout["default"] = AddressedDropout(name, module.lora_dropout["default"].p)
    model.train()
    def tell(step, row, lens):
        for module in modules.values():
            module.lora_dropout["default"].step, module.lora_dropout["default"].row = step, row
    return tell

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out"); parser.add_argument("--seed", type=int, default=0); parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    out, hidden_size, vocab = pathlib.Path(arguments.out), 64, 320
    for number, ((family, variant), (settings, clip, kept)) in enumerate(CASES.items()):
        if arguments.only and f"{family}/{variant}" not in arguments.only.split(","): continue
        config = families(hidden_size, vocab)[family][0]
        config._attn_implementation = "eager"
        def make():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
            randomise(model, arguments.seed)
            return model.eval()
        folder = out / family / "lora"
        start = folder / "attention" / "adapter" if variant == "warm_start" else None
        keep = lambda name: "layers.0." in name or any(part in name for part in kept)
        lora_case(make, folder / variant, vocab, arguments.seed + 100 + 20 * number, settings, clip, start=start, keep=keep,
                  dropout=addressed_dropout if settings.get("lora_dropout") else None, ratio=RATIO.get((family, variant)),
                  noise=(NOISE[family, variant], addressed_noise) if (family, variant) in NOISE else None)
        print(family, variant, "written")

if __name__ == "__main__":
    main()
