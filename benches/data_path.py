#!/usr/bin/env python3
"""Tokenizes, packs and stores rows with `pipeline` and with Hugging Face datasets, in turn, on the same rows and tokenizer.json.

    cargo build --release
    python benches/data_path.py --make 100 --dir /tmp/data_path                    # 100 MB of English, Chinese and code, and a tokenizer
    python benches/data_path.py --rows xsum.jsonl --prompt document --response summary --tokenizer ./my_model --dir /tmp/data_path

Ours is the program as users run it, in a new home each time: rows are read, cut to `--max-seq-len`, given labels, packed, hashed and
stored, and each stage's result is verified by the next. Theirs is `load_dataset`, `map` over batches with a fast tokenizer, packing as in
torchtune's `PackedDataset` (documents in their order) and Parquet; imports are not counted. Ids, labels and document lengths of all packs
are compared. Prints a line for each round, and the ratios of wall-clock time and of CPU-seconds: the median of the rounds and their range.

Needs `pip install datasets transformers` for the other side; without them ours is measured alone."""

import argparse
import importlib.util
import itertools
import json
import os
import pathlib
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time

IGNORE_INDEX = -100
TEMPLATE = "Summarize this dialogue:\n{}\n---\nSummary:\n"


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=pathlib.Path, required=True, help="a folder to work in")
    parser.add_argument("--make", type=int, metavar="MB", help="make that much mixed text, and a tokenizer for it")
    parser.add_argument("--rows", type=pathlib.Path, help="a JSONL file; without `--prompt` its column `text` is learned whole")
    parser.add_argument("--prompt", help="the column that is summarized")
    parser.add_argument("--response", help="the column with the summary")
    parser.add_argument("--tokenizer", type=pathlib.Path, help="a folder with tokenizer.json and tokenizer_config.json")
    parser.add_argument("--max-seq-len", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--program", type=pathlib.Path, default=pathlib.Path(__file__).parent.parent / "target/release/pipeline")
    parser.add_argument("--theirs", action="store_true", help=argparse.SUPPRESS)  # The other side, in a process of its own.
    return parser.parse_args()


# ---- A corpus ----------------------------------------------------------------------------------------------------------------------


def mixed(megabytes):
    """Rows of English, Chinese and code by turns: the same ones every time. Words follow Zipf's law, and some are new."""
    draw = random.Random(0)
    english, chinese, code = English(draw), Chinese(draw), Code(draw)
    made = 0
    while made < megabytes * 1_000_000:
        text = draw.choice([english, chinese, code]).document()
        made += len(text.encode())
        yield {"text": text}


def zipf(draw, words):
    """Draws words, the first ones most often."""
    weights, total = [], 0.0
    for rank in range(len(words)):
        total += 1 / (rank + 2.7) ** 1.05
        weights.append(total)
    return lambda count: draw.choices(words, cum_weights=weights, k=count)


def several(words):
    """Each word once, in the order in which they came."""
    return list(dict.fromkeys(words))


class English:
    def __init__(self, draw):
        self.draw = draw
        onsets = "b c d f g h l m n p r s t v w st tr th ch pl sh br".split() + [""]
        syllables = [a + b + c for a in onsets for b in "a e i o u ea ou".split() for c in ["", "n", "r", "s", "t", "ng", "l", "ck"]]
        self.word = lambda: "".join(draw.choice(syllables) for _ in range(draw.choice([1, 1, 2, 2, 3, 4])))
        words = "the of and to a in is was that for it with as on be at by I this he not are but had they's have which one".split()
        self.words = zipf(draw, words + several(self.word() for _ in range(60000)))

    def sentence(self):
        draw = self.draw
        words = self.words(draw.randint(5, 24))
        words[0] = words[0].capitalize()
        if draw.random() < 0.15:
            words[draw.randrange(len(words))] = str(draw.randrange(10000))
        if draw.random() < 0.1:
            words[draw.randrange(len(words))] = (self.word() + self.word()).capitalize()
        if draw.random() < 0.1:
            words[draw.randrange(len(words))] += draw.choice(["'s", "n't", "'ll", "’s"])
        if draw.random() < 0.4:
            words[len(words) // 2] += ","
        return " ".join(words) + draw.choice([".", ".", ".", "?", "!", ";", " —"])

    def document(self):
        return "\n\n".join(" ".join(self.sentence() for _ in range(self.draw.randint(2, 9))) for _ in range(self.draw.randint(1, 5)))


class Chinese:
    def __init__(self, draw):
        self.draw = draw
        letters = [chr(code) for code in range(0x4E00, 0x4E00 + 3500)]
        draw.shuffle(letters)
        self.letters = zipf(draw, letters)
        self.words = zipf(draw, several("".join(self.letters(draw.choice([1, 2, 2, 2, 3, 4]))) for _ in range(30000)))

    def document(self):
        draw, parts = self.draw, []
        for _ in range(draw.randint(5, 60)):
            parts += self.words(draw.randint(2, 9)) + [draw.choice("，，，。。、；？！") + ("\n" if draw.random() < 0.1 else "")]
            if draw.random() < 0.1:
                parts.append(f"{draw.randrange(3000)}年" if draw.random() < 0.5 else " GPT-4 ")
        return "".join(parts)


class Code:
    def __init__(self, draw):
        self.draw = draw
        stems = "get set make read write row name value index count path file node item list map key state user data size next".split()
        cases = [lambda words: "_".join(words), lambda words: "".join(word.capitalize() for word in words)]
        words = lambda: [draw.choice(stems) for _ in range(draw.randint(1, 3))]
        self.names = zipf(draw, several(draw.choice(cases)(words()) for _ in range(9000)))

    def line(self, depth):
        a, b, c, d = self.names(4)
        number = self.draw.choice([0, 1, 2, 8, 16, 255, self.draw.randrange(100000)])
        forms = [
            f"{a} = {b}({c}, {d})", f"if {a} != {number} and not {b}.{c}:", f"for {a} in range({number}):", f"return {a}[{b} + {number}]",
            f"self.{a} += {b}.{c}({d}=\"{a}\")  # {b} {c} {d}", f"let {a}: Vec<{b}> = {c}.iter().map(|{d}| {d} * {number}).collect();",
            f"assert_eq!({a}::{b}(&{c})?, 0x{number:04x});", f"{a}.{b}(f\"{{{c}:>8}} {d}\\n\")", f"}} else if ({a} && !{b}->{c}) {{", "",
        ]
        return "    " * depth + self.draw.choice(forms)

    def document(self):
        draw = self.draw
        lines, depth = [f"def {self.names(1)[0]}({', '.join(self.names(draw.randint(0, 4)))}):"], 1
        for _ in range(draw.randint(3, 80)):
            lines.append(self.line(depth))
            depth = min(max(1, depth + draw.choice([-1, 0, 0, 0, 1])), 5)
        return draw.choice(["\n", "\n", "\r\n"]).join(lines) + "\n"


def make(folder, megabytes):
    """Writes the corpus and a byte-level BPE tokenizer of 32,000 tokens, trained on its beginning."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rows = folder / "mixed.jsonl"
    with open(rows, "w", encoding="utf-8") as file:
        for row in mixed(megabytes):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=32000, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((row["text"] for row in mixed(min(megabytes, 8))), trainer)
    (folder / "tokenizer").mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return rows, folder / "tokenizer"


# ---- Ours --------------------------------------------------------------------------------------------------------------------------


def pipeline_file(given):
    rows = {"source": str(given.rows.resolve())}
    tokens = {"dataset": "rows", "tokenizer": "base.tokenizer", "add_bos": False}
    if given.prompt:
        rows |= {"template": "summarize", "column_map": {"dialogue": given.prompt, "output": given.response}}
        tokens["max_seq_len"] = given.max_seq_len
    files = {"tokenizer": str(given.tokenizer.resolve())}
    base = {"run": 'cp "$FILE_tokenizer"/* "$OUTPUT_tokenizer"', "files": files, "outputs": {"tokenizer": "tokenizer"}}
    resources = {"threads": given.threads}
    stages = {
        "rows": {"uses": "dataset", "with": rows},
        "base": {"uses": "command", "with": base},
        "tokens": {"uses": "tokenize", "with": tokens, "resources": resources},
        "packs": {"uses": "pack", "with": {"tokens": "tokens", "max_seq_len": given.max_seq_len}, "resources": resources},
    }
    return json.dumps({"version": 1, "name": "data_path", "stages": stages})


def ours(given, folder):
    """Runs the pipeline in a new home: wall-clock and CPU-seconds. The packs are put into `folder`."""
    file, home = given.dir / "data_path.yaml", given.dir / "home"
    file.write_text(pipeline_file(given))
    shutil.rmtree(home, ignore_errors=True)
    program = [str(given.program.resolve()), "--home", str(home.resolve())]
    measured = timed(lambda: subprocess.run([*program, "run", str(file)], check=True, capture_output=True), resource.RUSAGE_CHILDREN)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([*program, "export", str(file), "packs", str(folder)], check=True, capture_output=True)
    return measured


def timed(work, whose):
    def cpu():
        used = resource.getrusage(whose)
        return used.ru_utime + used.ru_stime

    wall, before = time.perf_counter(), cpu()
    work()
    return time.perf_counter() - wall, cpu() - before


# ---- Theirs ------------------------------------------------------------------------------------------------------------------------


def theirs(given, folder):
    """The same with datasets, in a process of its own that reports what it took without its imports."""
    environment = dict(os.environ, HF_DATASETS_OFFLINE="1", HF_HOME=str(given.dir / "hf"), RAYON_NUM_THREADS=str(given.threads))
    environment["TOKENIZERS_PARALLELISM"] = "true" if given.threads > 1 else "false"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    arguments = ["--theirs", "--dir", str(folder), "--rows", str(given.rows), "--tokenizer", str(given.tokenizer)]
    arguments += ["--max-seq-len", str(given.max_seq_len)]
    if given.prompt:
        arguments += ["--prompt", given.prompt, "--response", given.response]
    process = subprocess.run([sys.executable, __file__, *arguments], check=True, capture_output=True, env=environment, text=True)
    return json.loads(process.stdout.splitlines()[-1])


def run_theirs(given):
    import datasets
    import pyarrow
    import pyarrow.parquet
    from transformers import PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    datasets.disable_caching()
    config = json.loads((given.tokenizer / "tokenizer_config.json").read_text())
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(given.tokenizer / "tokenizer.json"), eos_token=config["eos_token"])
    eos, length = tokenizer.eos_token_id, given.max_seq_len
    encode = lambda texts: tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]

    def prompts(batch):
        ids, labels = [], []
        asked = encode([TEMPLATE.format(text) for text in batch[given.prompt]])
        for prompt, response in zip(asked, encode(batch[given.response])):
            row = prompt + response + [eos]
            label = [IGNORE_INDEX] * len(prompt) + response + [eos]
            if len(row) > length:
                learned = label[length - 1] != IGNORE_INDEX and any(one != IGNORE_INDEX for one in label[1 : length - 1])
                row, label = row[: length - 1] + [eos], label[: length - 1] + [eos if learned else IGNORE_INDEX]
            if any(one != IGNORE_INDEX for one in label[1:]):
                ids.append(row)
                labels.append(label)
        return {"input_ids": ids, "labels": labels}

    def texts(batch):
        rows = [row + [eos] for row in encode(batch["text"])]
        return {"input_ids": rows, "labels": rows}

    def work():
        rows = datasets.load_dataset("json", data_files=str(given.rows), split="train", cache_dir=str(given.dir / "cache"))
        mapped = rows.map(prompts if given.prompt else texts, batched=True, remove_columns=rows.column_names)
        packs = {"input_ids": [], "labels": [], "document_lengths": []}
        pack = tuple([] for _ in packs)

        def close():
            padding = length - len(pack[0])
            filled = (pack[0] + [tokenizer.pad_token_id or 0] * padding, pack[1] + [IGNORE_INDEX] * padding, pack[2])
            for column, values in zip(packs.values(), filled):
                column.append(values)

        for row in mapped:
            ids, labels = row["input_ids"], row["labels"]
            while ids:
                room = length - len(pack[0])
                if len(ids) > room and (given.prompt or room == 0):
                    close()
                    pack = ([], [], [])
                    continue
                pack = (pack[0] + ids[:room], pack[1] + labels[:room], pack[2] + [len(ids[:room])])
                ids, labels = ids[room:], labels[room:]
        close()
        lists = [pyarrow.list_(pyarrow.uint32()), pyarrow.list_(pyarrow.int32()), pyarrow.list_(pyarrow.uint32())]
        table = pyarrow.table(packs, schema=pyarrow.schema(list(zip(packs, lists))))
        pyarrow.parquet.write_table(table, given.dir / "part-00000.parquet", compression="snappy", use_dictionary=False)

    print(json.dumps(timed(work, resource.RUSAGE_SELF)))


# ---- Both --------------------------------------------------------------------------------------------------------------------------


def difference(one, other):
    """What differs between the packs in two folders, or None."""
    import pyarrow.parquet

    def packs(folder):
        for part in sorted(folder.glob("part-*.parquet")):
            for batch in pyarrow.parquet.ParquetFile(part).iter_batches(batch_size=64):
                yield from batch.to_pylist()

    count = 0
    for count, (left, right) in enumerate(itertools.zip_longest(packs(one), packs(other)), 1):
        if left is None or right is None:
            return f"one side has {count - 1} packs, the other more"
        for column in ["input_ids", "labels", "document_lengths"]:
            if left[column] != right[column]:
                return f"pack {count - 1} differs in {column}"
    return None if count else "there are no packs"


def summary(values):
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main():
    given = options()
    if given.theirs:
        return run_theirs(given)
    given.dir.mkdir(parents=True, exist_ok=True)
    if given.make:
        given.rows, given.tokenizer = make(given.dir, given.make)
    if not given.rows or not given.tokenizer or bool(given.prompt) != bool(given.response):
        sys.exit("give --make, or --rows and --tokenizer; --prompt and --response go together")
    missing = [name for name in ["datasets", "transformers", "pyarrow"] if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}; ours is measured alone", file=sys.stderr)
    megabytes = given.rows.stat().st_size / 1e6
    walls, cpus = [], []
    for number in range(1, given.rounds + 1):
        wall, cpu = ours(given, given.dir / "ours")
        line = f"round {number}: ours {wall:.2f} s, {cpu:.2f} CPU-s, {megabytes / cpu:.1f} MB per CPU-s"
        if not missing:
            their_wall, their_cpu = theirs(given, given.dir / "theirs")
            walls.append(their_wall / wall)
            cpus.append(their_cpu / cpu)
            line += f"; theirs {their_wall:.2f} s, {their_cpu:.2f} CPU-s; ratio {walls[-1]:.2f}, in CPU-s {cpus[-1]:.2f}"
        print(line, flush=True)
    if not missing:
        differs = difference(given.dir / "ours", given.dir / "theirs")
        print(f"{megabytes:.1f} MB, {given.threads} threads: ratio {summary(walls)} in wall-clock time, {summary(cpus)} in CPU-seconds")
        print(f"the packs are not equal: {differs}" if differs else "the packs are equal in ids, labels and document lengths")
        sys.exit(bool(differs))


if __name__ == "__main__":
    main()
