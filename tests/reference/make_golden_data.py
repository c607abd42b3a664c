#!/usr/bin/env python3
"""Writes the reference cases for the data stages: tokenizers, prompt/label construction, packing, chat templates, splits.

    pip install torchtune "torchao<0.13" torch==2.7.1 tokenizers datasets jinja2
    python make_golden_data.py OUT_DIR --xsum XSUM_TEST.jsonl

tokenizers/bytelevel, tokenizers/metaspace   trained here on XSum; tokenizer.json + tokenizer_config.json (chat_template)
sft.json     rows -> tokens, labels (prompt masked / unmasked; truncated to max_seq_len keeping a final EOS)
packs.json   torchtune's PackedDataset run on sft.json's rows (split_across_pack false and true)
chat.json    messages -> the text of the chat template, tokens and labels (loss on assistant turns only)
splits.json  datasets' slicing grammar: 'train[:10%]', 'train[10:20]+train[-5:]' ... -> row indices
"""
import argparse, json, pathlib
from tokenizers import Tokenizer, models, pre_tokenizers, decoders, trainers, processors, normalizers
import jinja2
ap = argparse.ArgumentParser(); ap.add_argument("out"); ap.add_argument("--xsum", required=True); a = ap.parse_args()
out = pathlib.Path(a.out); rows = [json.loads(l) for l in open(a.xsum)]
texts = [r["document"] + "\n" + r["summary"] for r in rows]
CHAT = ("{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}")

def bytelevel():
    t = Tokenizer(models.BPE()); t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False); t.decoder = decoders.ByteLevel()
    t.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=2048, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]))
    return t, dict(bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>", chat_template=CHAT, model_max_length=131072, tokenizer_class="PreTrainedTokenizerFast")
def metaspace():
    t = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)); t.pre_tokenizer = pre_tokenizers.Metaspace()
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    t.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1500, show_progress=False, limit_alphabet=200,
        special_tokens=["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]))
    t.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    return t, dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=True, model_max_length=4096, tokenizer_class="LlamaTokenizerFast")

def sft(t, prompt, response, max_len, train_on_input, bos, eos):
    """BOS + prompt + response + EOS. Prompt and response are encoded apart, without the tokenizer's own special tokens."""
    p = [bos] + t.encode(prompt, add_special_tokens=False).ids
    r = t.encode(response, add_special_tokens=False).ids + [eos]
    tokens = p + r; labels = (p if train_on_input else [-100] * len(p)) + r
    if len(tokens) > max_len:                       # torchtune's truncate(): the last token kept becomes EOS
        tokens, labels = tokens[:max_len], labels[:max_len]; tokens[-1] = eos; labels[-1] = eos
    return tokens, labels

def main():
    made = {}
    for name, make in (("bytelevel", bytelevel), ("metaspace", metaspace)):
        t, cfg = make(); d = out / "tokenizers" / name; d.mkdir(parents=True, exist_ok=True); t.save(str(d / "tokenizer.json"))
        json.dump(cfg, open(d / "tokenizer_config.json", "w"), indent=1); made[name] = (Tokenizer.from_file(str(d / "tokenizer.json")), cfg)
    cases = []
    tmpl = ("Summarize this dialogue:\n", "\n---\nSummary:\n")
    for name, (t, cfg) in made.items():
        bos, eos = t.token_to_id(cfg["bos_token"]), t.token_to_id(cfg["eos_token"])
        for toi in (False, True):
            case = dict(tokenizer=name, template="summarize", column_map={"dialogue": "document", "output": "summary"}, max_seq_len=512, train_on_input=toi, bos_id=bos, eos_id=eos, rows=[])
            for i, r in enumerate(rows[:24]):
                tok, lab = sft(t, tmpl[0] + r["document"] + tmpl[1], r["summary"], 512, toi, bos, eos)
                case["rows"].append(dict(index=i, tokens=tok, labels=lab))
            cases.append(case)
    json.dump(cases, open(out / "sft.json", "w"))
    from torchtune.datasets import PackedDataset
    packs = []
    short = [dict(tokens=c["tokens"][:40 + 37 * (i % 9)], labels=c["labels"][:40 + 37 * (i % 9)]) for i, c in enumerate(cases[1]["rows"])]
    for name, ds, max_len in (("full", cases[0]["rows"], 1024), ("short", short, 512)):
        for split in (False, True):
            p = PackedDataset([dict(tokens=r["tokens"], labels=r["labels"]) for r in ds], max_seq_len=max_len, padding_idx=0, split_across_pack=split)
            packs.append(dict(input=name, rows=ds if name == "short" else "sft.json[0].rows", max_seq_len=max_len, padding_id=0, split_across_pack=split,
                              packs=[{k: v.tolist() for k, v in x.items()} for x in p.packs]))
    json.dump(packs, open(out / "packs.json", "w"))
    t, cfg = made["bytelevel"]; env = jinja2.Environment(trim_blocks=True, lstrip_blocks=True); tpl = env.from_string(CHAT)
    convs = [[dict(role="system", content="You answer briefly."), dict(role="user", content="Who are you?"), dict(role="assistant", content="A small model."), dict(role="user", content=" And now? "), dict(role="assistant", content="Still the same.")],
             [dict(role="user", content="你是谁?"), dict(role="assistant", content="您好")]]
    chat = []
    for m in convs:
        text = tpl.render(messages=m, bos_token=cfg["bos_token"], add_generation_prompt=False)
        tokens, labels, prev = [], [], ""
        for k in range(1, len(m) + 1):              # turn by turn; the assistant's header belongs to the prompt
            upto = tpl.render(messages=m[:k], bos_token=cfg["bos_token"], add_generation_prompt=False)
            if m[k - 1]["role"] == "assistant":
                head = tpl.render(messages=m[:k - 1], bos_token=cfg["bos_token"], add_generation_prompt=True)
                parts = [(head[len(prev):], False), (upto[len(head):], True)]
            else: parts = [(upto[len(prev):], False)]
            for piece, learn in parts:
                ids = t.encode(piece, add_special_tokens=False).ids; tokens += ids; labels += ids if learn else [-100] * len(ids)
            prev = upto
        chat.append(dict(messages=m, text=text, prompt_text=tpl.render(messages=m[:-1], bos_token=cfg["bos_token"], add_generation_prompt=True), tokens=tokens, labels=labels))
    json.dump(chat, open(out / "chat.json", "w"), ensure_ascii=False)
    from datasets import Dataset, ReadInstruction
    from datasets.arrow_reader import _rel_to_abs_instr
    splits = []
    for n in (1000, 203, 7):
        for spec in ("train", "train[:20]", "train[:1%]", "train[:10%]", "train[10%:20%]", "train[-5:]", "train[-10%:]", "train[1:4]", "train[50%:52%]", "train[:33%]", "train[:2000]", "train[3:3]"):
            try:
                from datasets.splits import SplitInfo
                instr = ReadInstruction.from_spec(spec).to_absolute({"train": n})
                splits.append(dict(rows=n, spec=spec, ranges=[[i.from_, i.to] for i in instr]))
            except Exception as e: splits.append(dict(rows=n, spec=spec, error=type(e).__name__ + ": " + str(e)))
    for n, spec in ((1000, "train[:10]+train[-5:]"), (203, "train[:1%]+train[99%:]"), (203, "train[:1%](pct1_dropremainder)"), (1000, "train[:1%](pct1_dropremainder)"),
                    (50, "train[:1%]"), (50, "train[:3%]"), (50, "train[:5%]"), (50, "train[3%:7%]"), (1000, "train[:]"), (1000, "train[:-1]"), (1000, "train[-2000:]"), (1000, "train[:1%](closest)"),
                    (1000, "train[:10] + train[-5:]"), (1000, "train+train[:2]"), (203, "train[1%:50%](pct1_dropremainder)"), (203, "train[-1%:](pct1_dropremainder)"),
                    # errors
                    (7, "train[:1%](pct1_dropremainder)"), (1000, "train[:10](pct1_dropremainder)"), (1000, "train[:10%](nearest)"), (1000, "test[:10]"), (1000, "train[:101%]"),
                    (1000, "train[-101%:]"), (1000, "train[:10%"), (1000, "train[a:b]"), (1000, "train[10]"), (1000, "train[:1.5%]"), (1000, "train [:2]"), (1000, "")):
        try: splits.append(dict(rows=n, spec=spec, ranges=[[i.from_, i.to] for i in ReadInstruction.from_spec(spec).to_absolute({"train": n})]))
        except Exception as e: splits.append(dict(rows=n, spec=spec, error=type(e).__name__ + ": " + str(e)))
    json.dump(splits, open(out / "splits.json", "w"), indent=0)
main()
