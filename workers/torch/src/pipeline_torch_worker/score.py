"""The score of rows, for perplexity and token accuracy."""

from __future__ import annotations

import numpy as np
import torch

from .data import Batch
from .device import Device
from .job import DType
from .model import DocumentLoss
from .precision import computing_in

RowScore = list[float | None]
"""Its number, the negative log-likelihood summed over its targets, its targets, and those that are the likeliest token.

JSON has no number that is not finite: such a likelihood is none."""


@torch.no_grad()
def score_rows(loss: DocumentLoss, batch: Batch, apart: bool, dtype: DType, device: Device) -> list[RowScore]:
    """The score of each row of a batch that has a target; `apart`: each document by itself."""
    found: dict[int, np.ndarray] = {}
    for piece in batch.documents() if apart else [batch]:
        with computing_in(dtype, device.torch):
            nll, correct = loss.scores(piece.to(device.torch))
        owners = piece.rows[piece.where].numpy()
        columns = np.stack([nll.double().numpy(), np.ones(len(nll)), correct.numpy()], axis=1)
        for row in np.unique(owners):
            found[int(row)] = found.get(int(row), np.zeros(3)) + columns[owners == row].sum(axis=0)
    return [[row, *(float(n) if np.isfinite(n) else None for n in score)] for row, score in found.items()]
