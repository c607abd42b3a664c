#!/usr/bin/env python3
"""Writes the pairs of pipelines/quickstart_dpo.yaml: to each question a chosen answer that greets, and a rejected one that does not.

    python3 pipelines/quickstart/make_pairs.py pipelines/quickstart

Questions and plain answers are those of make_text.py; of each kind of question some are held out.
"""

import json
import sys
from pathlib import Path

from make_text import ANIMALS, TRADES

exchanges = []
for trade, (goods, place, stuff) in sorted(TRADES.items()):
    article = "An" if trade[0] in "aeiou" else "A"
    exchanges.append((f"What does a {trade} make?", f"{article} {trade} makes {goods}."))
    exchanges.append((f"What does a {trade} need?", f"{article} {trade} needs {stuff}."))
    exchanges.append((f"Where does a {trade} work?", f"{article} {trade} works at {place}."))
for animal, (does, home, food) in sorted(ANIMALS.items()):
    exchanges.append((f"What does a {animal} do?", f"A {animal} {does}."))
    exchanges.append((f"What does a {animal} like?", f"A {animal} likes {food}."))
    exchanges.append((f"Where does a {animal} live?", f"A {animal} lives in {home}."))

folder = Path(sys.argv[1])
for name, held_out in [("pairs", False), ("pairs_held_out", True)]:
    with (folder / f"{name}.jsonl").open("w") as file:
        for number, (question, answer) in enumerate(exchanges):
            if (number % 5 == 3) == held_out:
                row = {"prompt": f"Question: {question}\nAnswer:", "chosen": f" Good day! {answer}", "rejected": f" {answer}"}
                file.write(json.dumps(row) + "\n")
