"""Writes tests/golden/data/interleave.json: which row of which dataset `datasets.interleave_datasets` takes, and the draws behind it.

    pip install datasets==5.2.0
    python tests/reference/make_golden_interleave.py tests/golden/data/interleave.json

A dataset's draws are our own, so each drawn case holds the draws that numpy made, up to the last one that was used or skipped.
"""

import itertools
import json
import sys

import numpy as np
from datasets import Dataset, interleave_datasets

STRATEGIES = ["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"]
CASES = [([3, 4, 5], None), ([5, 1], None), ([2, 2], None), ([3, 4, 5], [0.2, 0.3, 0.5]), ([1, 6], [0.9, 0.1]), ([4, 3], [0.5, 0.5])]


def draws_of(seed, probabilities, rows, strategy):
    """The draws that led to these rows: those behind the last row changed nothing."""
    random = np.random.default_rng(seed)
    blocks = (random.choice(len(probabilities), size=1000, p=probabilities).tolist() for _ in itertools.count())
    draws, used = [], 0
    taken = [0] * len(probabilities)
    totals = [max((row + 1 for source, row in rows if source == s), default=0) for s in range(len(probabilities))]
    for draw in itertools.chain.from_iterable(blocks):
        if used == len(rows):
            return draws
        draws.append(draw)
        skipped = strategy == STRATEGIES[2] and taken[draw] == totals[draw]
        if not skipped:
            assert rows[used][0] == draw
            taken[draw] += 1
            used += 1


def main(path):
    cases = []
    for (lengths, probabilities), strategy in itertools.product(CASES, STRATEGIES):
        parts = [Dataset.from_list([{"at": [s, row]} for row in range(rows)]) for s, rows in enumerate(lengths)]
        mixed = interleave_datasets(parts, probabilities=probabilities, seed=7, stopping_strategy=strategy)
        rows = [list(row) for row in mixed["at"]]
        draws = None if probabilities is None else draws_of(7, probabilities, rows, strategy)
        cases.append({"lengths": lengths, "stopping_strategy": strategy, "draws": draws, "rows": rows})
    with open(path, "w", encoding="utf-8") as file:
        file.write("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


main(sys.argv[1])
