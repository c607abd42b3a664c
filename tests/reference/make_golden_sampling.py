#!/usr/bin/env python3
"""Writes logits as transformers processes them before a token is chosen: what `model::sampling` is compared with.

The processors and their order are those that `GenerationMixin` itself makes for a generation config.

    pip install torch transformers
    python make_golden_sampling.py OUT.json
"""
import json, sys
import numpy, torch, transformers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

VOCAB = 48
model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                     num_attention_heads=2, num_key_value_heads=2))


def process(logits, seen, prompt_length, settings):
    """What the sampler would see: scores after all processors."""
    greedy = settings["temperature"] == 0
    config = GenerationConfig(
        do_sample=not greedy, temperature=None if greedy else settings["temperature"], top_k=settings["top_k"] or 0,
        top_p=1.0 if settings["top_p"] is None else settings["top_p"], min_p=settings["min_p"],
        repetition_penalty=settings["repetition_penalty"], min_new_tokens=settings["min_new_tokens"],
        eos_token_id=settings["stop_token_ids"] or None)
    config._eos_token_tensor = torch.tensor(settings["stop_token_ids"]) if settings["stop_token_ids"] else None
    processors = model._get_logits_processor(
        generation_config=config, input_ids_seq_length=prompt_length, encoder_input_ids=None,
        prefix_allowed_tokens_fn=None, logits_processor=transformers.LogitsProcessorList(), device="cpu")
    return processors(torch.tensor([seen]), torch.tensor([logits], dtype=torch.float32))[0].tolist()


def short(values):
    """Single-precision numbers in their shortest form, minus infinity as null."""
    return [None if value == float("-inf") else float(str(numpy.float32(value))) for value in values]


def main(out):
    generator = torch.Generator().manual_seed(11)
    random = lambda scale: (torch.randn(VOCAB, generator=generator) * scale).tolist()
    ids = lambda count: torch.randint(0, VOCAB, (count,), generator=generator).tolist()
    plain = dict(temperature=1.0, top_k=None, top_p=None, min_p=None, repetition_penalty=None, min_new_tokens=None,
                 stop_token_ids=[])
    grid = [dict()]
    grid += [dict(temperature=t) for t in (0.0, 0.1, 0.6, 0.7, 1.3, 5.0)]
    grid += [dict(top_k=k) for k in (1, 2, 7, 47, 48, 300)]
    grid += [dict(top_p=p) for p in (0.01, 0.3, 0.5, 0.9, 0.95, 0.999, 1.0)]
    grid += [dict(min_p=p) for p in (0.0, 0.01, 0.05, 0.2, 0.9, 1.0)]
    grid += [dict(repetition_penalty=r) for r in (0.5, 1.0, 1.1, 1.2, 3.0)]
    grid += [dict(temperature=0.0, repetition_penalty=r) for r in (1.1, 2.0)]
    grid += [dict(min_new_tokens=n, stop_token_ids=[2, 40, 7]) for n in (1, 5, 6, 20)]
    grid += [dict(temperature=0.0, min_new_tokens=20, stop_token_ids=[2, 5], repetition_penalty=1.3)]
    grid += [dict(temperature=t, top_k=k, top_p=p, min_p=m, repetition_penalty=r)
             for t, k, p, m, r in [(0.6, 300, None, None, None), (0.6, 20, 0.95, None, None), (0.7, 40, 0.9, 0.05, 1.1),
                                   (1.5, None, 0.8, 0.1, None), (2.0, 10, 0.5, 0.3, 1.2), (0.8, 5, None, 0.2, None),
                                   (0.3, None, 0.99, 0.001, 1.05), (1.0, 3, 0.7, 0.5, 2.0)]]
    rows = [("spread", random(3.0)), ("flat", random(0.3))]
    # Equal logits: which of them top-k and top-p keep is part of the behaviour. A power of two makes the sums exact.
    tied = [1.0] * 16 + [0.0] * 16 + [-2.0] * 16
    masked = [logit if index % 3 else float("-inf") for index, logit in enumerate(random(2.0))]
    cases = []
    for change in grid:
        for name, logits in rows:
            cases.append((name, logits, change))
    for change in (dict(top_k=5), dict(top_k=20), dict(top_p=0.5), dict(top_p=0.7), dict(top_k=16, top_p=0.5), dict(min_p=0.3),
                   dict(min_p=0.5), dict(top_p=0.2, min_p=0.5)):
        cases.append(("tied", tied, change))
    cases.append(("equal", [0.25] * 32, dict(top_p=0.5)))
    for change in (dict(), dict(top_k=4), dict(top_p=0.6), dict(min_p=0.1), dict(repetition_penalty=1.4, top_p=0.9)):
        cases.append(("masked", masked, change))
    written = []
    for name, logits, change in cases:
        settings = plain | change
        seen, prompt_length = ids(11), 6  # five new tokens
        processed = process(logits, seen, prompt_length, settings)
        banned = settings["stop_token_ids"] if settings["min_new_tokens"] and 5 < settings["min_new_tokens"] else []
        written.append(dict(logits=name, seen=seen, banned=banned,
                            temperature=settings["temperature"], top_k=settings["top_k"], top_p=settings["top_p"],
                            min_p=settings["min_p"], repetition_penalty=settings["repetition_penalty"],
                            processed=short(processed)))
    made_by = f"make_golden_sampling.py, transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}; null is -inf"
    logits = ",\n".join(f"  {json.dumps(name)}: {json.dumps(short(logits))}" for name, logits in {n: l for n, l, _ in cases}.items())
    lines = ",\n".join("  " + json.dumps(case) for case in written)
    with open(out, "w") as file:
        file.write(f'{{\n "made_by": {json.dumps(made_by)},\n "logits": {{\n{logits}\n }},\n "cases": [\n{lines}\n ]\n}}\n')
    print(len(written), "cases")


main(sys.argv[1])
