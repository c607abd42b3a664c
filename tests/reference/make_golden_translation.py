#!/usr/bin/env python3
"""Writes chrF, chrF++ and TER of sacrebleu: what `stages::metrics::chrf` and `ter` are compared with.

Scores with sacrebleu's defaults, one reference each: of each pair alone, and of all of them together.

    pip install sacrebleu
    python make_golden_translation.py OUT.json
"""

import json
import random
import sys

import sacrebleu
from make_golden_bleu import PAIRS

MARKS = [
    ("(hi) there, world!", "(hi) there world"),
    ("a b c d e f", "d e f a b c"),
    ("Ünïcode ß straße…", "ünïcode SS Straße …"),
    ("“quoted” 'words' -x- !", "\"quoted\" words x"),
    ("a\u00a0b\u2003c\x1cd", "a b c d"),
    ("one two three", ""),
    ("", "one two three"),
    ("", ""),
    ("x " * 90, "x y " * 60),
    ("今天 天气 很好。", "今天 的 天气 很 好。"),
]


def shuffled(count):
    """Texts whose phrases are moved, repeated, replaced and left out."""
    draw = random.Random(7)
    for number in range(count):
        words = [draw.choice("abcdefghijklmnop"[: 3 + number % 14]) * draw.randint(1, 2) for _ in range(draw.randint(1, 70))]
        moved = list(words)
        for _ in range(draw.randint(0, 4)):
            start, length, target = draw.randrange(len(moved) + 1), draw.randint(1, 12), draw.randrange(len(moved) + 1)
            phrase = moved[start : start + length]
            del moved[start : start + length]
            moved[target:target] = phrase
        for _ in range(draw.randint(0, 6)):
            at = draw.randrange(len(moved) + 1)
            moved[at : at + draw.randint(0, 1)] = draw.choice([[], ["q"], ["a", "b"]])
        yield " ".join(moved), " ".join(words)


def figures(hypotheses, references):
    ter = sacrebleu.corpus_ter(hypotheses, [references])
    return dict(
        chrf=sacrebleu.corpus_chrf(hypotheses, [references]).score,
        chrf_plus_plus=sacrebleu.corpus_chrf(hypotheses, [references], word_order=2).score,
        ter=ter.score,
        edits=ter.num_edits,
    )


def main():
    pairs = [*PAIRS, *MARKS, *shuffled(80)]
    rows = [dict(hypothesis=one, reference=other, **figures([one], [other])) for one, other in pairs]
    together = figures([one for one, _ in pairs], [other for _, other in pairs])
    made_by = f"sacrebleu {sacrebleu.__version__}"
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(dict(made_by=made_by, pairs=rows, together=together), file, ensure_ascii=False, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
