#!/usr/bin/env python3
"""Writes BLEU scores of sacrebleu: what `stages::bleu` is compared with.

Corpus scores with sacrebleu's defaults (13a tokenizer, exponential smoothing, case kept, one reference each), and the score of
each pair alone (`sentence_bleu`, which goes up to the longest order that the hypothesis has).

    pip install sacrebleu
    python make_golden_bleu.py OUT.json
"""
import json, sys
import sacrebleu

PAIRS = [
    ("the cat sat on the mat", "the cat sat on the mat"),
    ("The cat sat on the mat.", "the cat sat on the mat."),
    ("the the the the the the the", "the cat is on the mat"),
    ("the cat", "the cat is on the mat"),
    ("the cat is on the mat and it is not going away any time soon", "the cat is on the mat"),
    ("", "the cat is on the mat"),
    ("the cat is on the mat", ""),
    ("", ""),
    ("   \n ", "a b"),
    ("cat", "cat"),
    ("cat", "dog"),
    ("a b", "a b"),
    ("a b c", "a b c"),
    ("one two three", "one two three four"),
    ("It costs 1,234.56 dollars, or 3.5 percent.", "It costs 1,234.56 dollars or 3.5%."),
    ("In 2024-25 the U.S. grew by 2.5%-3%", "In 2024-2025, the U.S. grew 2.5% to 3%."),
    ("He said: \"No!\" (twice) & left...", "He said \"no\" twice, & left..."),
    ("&quot;Hello&quot; &amp; &lt;b&gt;", "\"Hello\" & <b>"),
    ("a hyphen-\nated word", "a hyphenated word"),
    ("line one\nline two", "line one line two"),
    ("<skipped>some text", "some text"),
    ("naïve café déjà vu", "naive café deja vu"),
    ("我是一个小模型。", "我是一个小模型。"),
    ("我 是 一个 小 模型", "我 是 一个 大 模型"),
    ("emoji 🙂 and 🙃 here", "emoji 🙂 and 🙂 here"),
    ("tab\tand\u00a0no-break\u2003space", "tab and no-break space"),
    ("x.y,z", "x . y , z"),
    ("1.2.3,4", "1.2.3 , 4"),
    (".5 and ,5 and 5. and 5,", ".5 and , 5 and 5 . and 5,"),
    ("path/to/file_name#tag@home^2 ~ `code` {a} [b] |c|", "path / to / file_name #tag @home ^2 ~ `code` { a } [ b ] | c |"),
    ("email me at a.b@c.de!", "email me at a.b@c.de !"),
    ("don't won't can't it's", "don't won't can't its"),
    ("a a a b b c", "a a b b b c c"),
    ("\u001cfile\u001dgroup\u001e", "file group"),
    ("The quick brown fox jumps over the lazy dog", "The quick brown dog jumps over the lazy fox"),
    ("A summary of the article that says little about anything at all.", "The article says that little is known about it."),
    ("z" * 40 + " y", "z" * 40 + " x"),
    ("a-b - c -- d", "a - b-c – d—e"),
]


def figures(score):
    return dict(score=score.score, precisions=score.precisions, brevity_penalty=score.bp, counts=score.counts,
                totals=score.totals, hypothesis_length=score.sys_len, reference_length=score.ref_len)


def main(out):
    corpora = [list(range(len(PAIRS))), [0], [5], [5, 7], [6], [3, 9], [9, 10, 11], [22, 23, 24], [10], [12, 13, 34, 35], [14, 15, 16, 17],
               list(range(26, 32))]
    corpus = []
    for rows in corpora:
        score = sacrebleu.corpus_bleu([PAIRS[row][0] for row in rows], [[PAIRS[row][1] for row in rows]])
        corpus.append(dict(rows=rows, **figures(score)))
    pairs = [dict(hypothesis=hypothesis, reference=reference, **figures(sacrebleu.sentence_bleu(hypothesis, [reference])),
                  tokens=sacrebleu.metrics.BLEU().tokenizer(hypothesis.rstrip()))
             for hypothesis, reference in PAIRS]
    made_by = f"make_golden_bleu.py, sacrebleu {sacrebleu.__version__}"
    with open(out, "w") as file:
        write = lambda items: ",\n".join("  " + json.dumps(item, ensure_ascii=True) for item in items)
        file.write(f'{{\n "made_by": {json.dumps(made_by)},\n "pairs": [\n{write(pairs)}\n ],\n "corpora": [\n{write(corpus)}\n ]\n}}\n')
    print(len(pairs), "pairs,", len(corpus), "corpora")


if __name__ == "__main__":
    main(sys.argv[1])
