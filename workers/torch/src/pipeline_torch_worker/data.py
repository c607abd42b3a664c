"""Rows of a Tokens or Packs artefact, and the micro-batches made of them.

A micro-batch is one sequence: the documents of its rows one after the other, without their padding.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import torch
from numpy.typing import NDArray

from .failure import JobFailure
from .job import Rows

IGNORE_INDEX = -100
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Row:
    """A document, or several of them; padding is cut off."""

    number: int
    input_ids: Ids
    labels: Ids
    document_lengths: list[int]

    def targets(self) -> Ids:
        """What each token predicts: the label of the next one of its document, which its last has not."""
        targets = np.full_like(self.labels, IGNORE_INDEX)
        targets[:-1] = self.labels[1:]
        ends = np.cumsum(np.asarray(self.document_lengths, dtype=np.int64))
        targets[ends - 1] = IGNORE_INDEX
        return targets


class RowTable:
    """The rows of an artefact by number."""

    def __init__(self, rows: Rows) -> None:
        columns = ["input_ids", "labels", *(["document_lengths"] if rows.packed else [])]
        self._packed = rows.packed
        self._parts = [parquet.read_table(part, columns=columns, memory_map=True) for part in rows.parts]
        self._ends = list(itertools.accumulate(part.num_rows for part in self._parts))
        self._parts = [part.combine_chunks() for part in self._parts]
        if len(self) != rows.rows:
            raise JobFailure("bad_data", f"the parts hold {len(self)} rows, and the job says {rows.rows}")

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, number: int) -> Row:
        """Reads a row."""
        if not 0 <= number < len(self):
            raise JobFailure("bad_data", f"row {number} is asked for, of {len(self)}")
        part = bisect.bisect_right(self._ends, number)
        table = self._parts[part]
        index = number - (self._ends[part] - table.num_rows)

        def column(name: str) -> Ids:
            values = table.column(name)[index].values
            return np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.int64)

        input_ids, labels = column("input_ids"), column("labels")
        lengths = [int(length) for length in column("document_lengths")] if self._packed else [len(input_ids)]
        lengths = [length for length in lengths if length > 0]
        real = sum(lengths)
        return Row(number, input_ids[:real], labels[:real], lengths)


@dataclass(frozen=True)
class Batch:
    """Documents that are computed together, one after the other in one sequence."""

    input_ids: torch.Tensor
    """`[tokens]`."""
    positions: torch.Tensor
    """`[tokens]`, from 0 in each document."""
    targets: torch.Tensor
    """`[tokens]`: the id that each token predicts, or -100."""
    document_lengths: list[int]
    rows: torch.Tensor
    """`[tokens]`: the row of the data that each token belongs to."""
    tokens_in_row: torch.Tensor
    """`[tokens]`: each token's number in its row."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Batch:
        """A batch of whole rows."""
        lengths = [length for row in rows for length in row.document_lengths]

        def join(arrays: list[Ids]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *arrays]))

        return cls(
            input_ids=join([row.input_ids for row in rows]),
            positions=join([np.arange(length) for length in lengths]),
            targets=join([row.targets() for row in rows]),
            document_lengths=lengths,
            rows=join([np.full(len(row.input_ids), row.number) for row in rows]),
            tokens_in_row=join([np.arange(len(row.input_ids)) for row in rows]),
        )

    @classmethod
    def of_nothing(cls) -> Batch:
        """One token without a target: what a rank computes that has to take part and has no row."""
        row = Row(0, np.zeros(1, np.int64), np.full(1, IGNORE_INDEX, np.int64), [1])
        return cls.of([row])

    @property
    def tokens(self) -> int:
        """Tokens computed."""
        return len(self.input_ids)

    @property
    def target_tokens(self) -> int:
        """Tokens that the loss is taken over."""
        return int((self.targets != IGNORE_INDEX).sum())

    def documents(self) -> Iterator[Batch]:
        """Each document as a batch of its own."""
        start = 0
        for length in self.document_lengths:
            piece = slice(start, start + length)
            yield Batch(
                self.input_ids[piece],
                self.positions[piece],
                self.targets[piece],
                [length],
                self.rows[piece],
                self.tokens_in_row[piece],
            )
            start += length

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; the places that draws are addressed by stay where whole numbers of 64 bits are quick."""
        places = device if device.type == "cuda" else torch.device("cpu")
        return Batch(
            self.input_ids.to(device),
            self.positions.to(device),
            self.targets.to(device),
            self.document_lengths,
            self.rows.to(places),
            self.tokens_in_row.to(places),
        )


@dataclass(frozen=True)
class StepPlan:
    """An optimizer step as the stage laid it down."""

    epoch: int
    rows: list[int]
    learning_rate: float


def read_steps(path: Path, total_steps: int) -> list[StepPlan]:
    """The steps of the whole run."""
    steps = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                value = json.loads(line)
                plan = StepPlan(int(value["epoch"]), list(map(int, value["rows"])), float(value["learning_rate"]))
            except (ValueError, KeyError, TypeError) as error:
                raise JobFailure("internal", f"line {number} of `{path}` is no step") from error
            steps.append(plan)
    if len(steps) < total_steps:
        raise JobFailure("internal", f"`{path}` has {len(steps)} steps, and the job {total_steps}")
    return steps


def listed(rows: Sequence[int], most: int = 8) -> str:
    """`3, 17, 4 and 9 more`."""
    named = ", ".join(str(row) for row in rows[:most])
    return named if len(rows) <= most else f"{named} and {len(rows) - most} more"
