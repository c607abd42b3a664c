"""What the tasks beside it name with `!function`."""

import random

import numpy as np


def process_docs(dataset):
    def one(row):
        choices = list(row["choices"])
        random.shuffle(choices)
        return {"shuffled": choices, "gold": choices.index(row["choices"][row["answer"]])}

    return dataset.filter(lambda row: len(row["question"]) > 12).map(one)


def text(row):
    return f"Question: {row['question']}\nAnswer:"


def choices(row):
    return row["shuffled"]


def gold(row):
    return row["gold"]


def shown():
    return [{"question": "What is shown?", "shuffled": ["this", "that"], "gold": 1}]


def results(row, answers):
    likelihoods = np.array([answer[0] for answer in answers])
    best = int(np.argmax(likelihoods))
    margin = likelihoods[row["gold"]] - likelihoods.max() if best != row["gold"] else np.nan
    return {"acc": best == row["gold"], "margin": margin, "widest": (likelihoods.max(), likelihoods.min())}


def widest(pairs):
    return max(most - least for most, least in pairs)


def weighted(items):
    gold, made = zip(*items)
    return float(np.mean([2.0 if one == other == 0 else float(one == other) for one, other in zip(gold, made)]))


class Cut:
    def __init__(self, letters=1):
        self.letters = letters

    def apply(self, responses, rows):
        return [[text[: self.letters] for text in of_row] for of_row in responses]


def lower(responses, rows):
    return [[text.lower() for text in of_row] for of_row in responses]


def shared(references, predictions, least=0):
    return float(len(set(references[0]) & set(predictions[0])) >= least)


def several(items):
    right, said = items
    return {"begins": right[:1] == said[:1], "said": len(said)}


def of_response(row, answers):
    (said,) = answers
    return {"length": len(said), "words": said.split()}


def together(lists):
    return len({word for words in lists for word in words})


def of_text(row, answers):
    (likelihood,) = answers
    return {
        "word_perplexity": (likelihood, len(row["question"].split())),
        "bits_per_byte": (likelihood, len(row["question"].encode())),
    }
