"""Micro-batches, and how a request has them.

A micro-batch is one sequence: the documents of its rows one after the other, without their padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

IGNORE_INDEX = -100
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Documents that are computed together, one after the other in one sequence."""

    input_ids: torch.Tensor
    """`[tokens]`."""
    positions: torch.Tensor
    """`[tokens]`, from 0 in each document."""
    targets: torch.Tensor
    """`[tokens]`: the id that each token predicts, or -100."""
    where: torch.Tensor
    """`[targets]`: the tokens that predict one, found on the processor: a GPU would have to be waited for."""
    document_lengths: list[int]
    rows: torch.Tensor
    """`[tokens]`: the row of the data that each token belongs to."""
    tokens_in_row: torch.Tensor
    """`[tokens]`: each token's number in its row."""
    weights: torch.Tensor | None = None
    """`[targets]`: the weight of each target in the loss; 1 each where there are none."""
    responses: torch.Tensor | None = None
    """`[targets]`: whether each target belongs to a response; all do where it is not said."""

    @classmethod
    def of_documents(
        cls,
        input_ids: Ids,
        targets: Ids,
        lengths: list[int],
        rows: Ids,
        weights: NDArray[np.float32] | None = None,
        responses: NDArray[np.bool_] | None = None,
    ) -> Batch:
        """A batch of documents, of which those of a row follow each other."""
        each, tokens = np.asarray(lengths, np.int64), np.arange(len(input_ids))
        starts = np.cumsum(each) - each
        # The documents of a row count on from its first.
        opens = np.concatenate([np.ones(1, bool), rows[1:] != rows[:-1]])[: len(each)]
        of_row = starts[np.maximum.accumulate(np.where(opens, np.arange(len(each)), 0))]
        return cls(
            input_ids=torch.from_numpy(input_ids),
            positions=torch.from_numpy(tokens - np.repeat(starts, each)),
            targets=torch.from_numpy(targets),
            where=torch.from_numpy(np.flatnonzero(targets != IGNORE_INDEX)),
            document_lengths=lengths,
            rows=torch.from_numpy(np.repeat(rows, each)),
            tokens_in_row=torch.from_numpy(tokens - np.repeat(of_row, each)),
            weights=None if weights is None else torch.from_numpy(weights),
            responses=None if responses is None else torch.from_numpy(responses),
        )

    @classmethod
    def of_nothing(cls) -> Batch:
        """One token without a target: what a rank computes that has to take part and has no row."""
        zero = np.zeros(1, np.int64)
        return cls.of_documents(zero, np.full(1, IGNORE_INDEX, np.int64), [1], zero)

    @property
    def tokens(self) -> int:
        """Tokens computed."""
        return len(self.input_ids)

    @property
    def target_tokens(self) -> int:
        """Tokens that the loss is taken over."""
        return len(self.where)

    def documents_of_targets(self) -> torch.Tensor:
        """`[targets]`: the document of each target, counting those that have one."""
        of_tokens = torch.repeat_interleave(
            torch.arange(len(self.document_lengths)), torch.tensor(self.document_lengths)
        )
        of_targets = of_tokens[self.where.cpu()]
        _, found = torch.unique_consecutive(of_targets, return_inverse=True)
        return cast(torch.Tensor, found)

    def documents(self) -> Iterator[Batch]:
        """Each document as a batch of its own."""
        start, before = 0, 0
        for length in self.document_lengths:
            piece = slice(start, start + length)
            where = (self.targets[piece] != IGNORE_INDEX).nonzero()[:, 0]
            targets = slice(before, before + len(where))
            before = targets.stop
            yield Batch(
                self.input_ids[piece],
                self.positions[piece],
                self.targets[piece],
                where,
                [length],
                self.rows[piece],
                self.tokens_in_row[piece],
                None if self.weights is None else self.weights[targets],
                None if self.responses is None else self.responses[targets],
            )
            start += length

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; the places that draws are addressed by stay where whole numbers of 64 bits are quick."""
        places = device if device.type == "cuda" else torch.device("cpu")

        def moved(tensor: torch.Tensor, to: torch.device = device) -> torch.Tensor:
            # CUDA has copied memory that is not pinned before this returns, and need not have done what it was given before.
            return tensor.to(to, non_blocking=device.type == "cuda")

        return Batch(
            moved(self.input_ids),
            moved(self.positions),
            moved(self.targets),
            moved(self.where),
            self.document_lengths,
            moved(self.rows, places),
            moved(self.tokens_in_row, places),
            None if self.weights is None else moved(self.weights),
            None if self.responses is None else moved(self.responses),
        )


def read_batches(ranks: Sequence[Sequence[Mapping[str, int]]], payload: memoryview) -> list[list[Batch]]:
    """The micro-batches of each rank in a request, whose numbers follow each other."""
    start = 0

    def take(count: int, kind: type[np.generic]) -> NDArray[Any]:
        nonlocal start
        found = np.frombuffer(payload, kind, count, start)
        start += found.nbytes
        return found.astype(np.float32 if kind is np.float32 else np.int64)

    def batch(counts: Mapping[str, int]) -> Batch:
        input_ids, lengths = take(counts["tokens"], np.uint32), take(counts["documents"], np.uint32)
        rows = take(counts["documents"], np.uint64)
        places, ids = take(counts["targets"], np.uint32), take(counts["targets"], np.uint32)
        targets = np.full(len(input_ids), IGNORE_INDEX, np.int64)
        targets[places] = ids
        weights = take(counts["targets"], np.float32) if counts["weighted"] else None
        responses = take(counts["targets"], np.uint8) != 0 if counts["responses"] else None
        return Batch.of_documents(input_ids, targets, lengths.tolist(), rows, weights, responses)

    return [[batch(counts) for counts in of_rank] for of_rank in ranks]
