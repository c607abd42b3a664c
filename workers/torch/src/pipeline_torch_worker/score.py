"""The loss of rows, for perplexity and token accuracy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from . import adapter, output
from .architecture import shares_state, turns_by_length
from .attention import NAME, choose
from .data import IGNORE_INDEX, Batch, Row, listed
from .device import Device
from .draws import Draws
from .events import Voice
from .failure import JobFailure
from .job import ScoreJob
from .model import DocumentLoss, load_base, read_config
from .parallel import Ranks
from .precision import COMPUTE_TYPES, computing_in
from .stopping import StopRequest


@torch.no_grad()
def run(job: ScoreJob, device: Device, ranks: Ranks, voice: Voice, stop: StopRequest) -> dict[str, object]:
    """Scores all rows, each rank its share; how it was computed."""
    rows = _read_rows(job.rows)
    config = read_config(job.model)
    kernel = choose("auto", device, job.dtype, config)
    model = load_base(job.model, config, COMPUTE_TYPES[job.dtype], NAME)
    if job.adapter is not None:
        adapter.attach(model, job.adapter, trained=False)
    loss = DocumentLoss(model, kernel, Draws(seed=0)).to(device.torch)
    apart = turns_by_length(config) or shares_state(model) is not None

    found = np.zeros((len(rows), 3))
    ours = rows[ranks.rank :: ranks.world]
    for start in range(0, len(ours), job.batch_size):
        if stop:
            raise JobFailure("cancelled", f"stopped after {start} of {len(ours)} rows", "run again")
        of_batch = ours[start : start + job.batch_size]
        whole = Batch.of(of_batch)
        for batch in whole.documents() if apart else [whole]:
            with computing_in(job.dtype, device.torch):
                nll, correct = loss.scores(batch.to(device.torch))
            owners = batch.rows[batch.targets != IGNORE_INDEX].numpy()
            np.add.at(found, owners, np.stack([nll.double().numpy(), np.ones(len(nll)), correct.numpy()], axis=1))
        if not np.isfinite(found).all():
            message = f"the loss is not finite in rows {listed([row.number for row in of_batch])}"
            raise JobFailure("numeric", message, "the model or the adapter is at fault, or f16 is too narrow for it")
        done = min(len(rows), (start + len(of_batch)) * ranks.world)
        voice.progress("rows", done, len(rows))
    found = np.reshape(ranks.sum(list(found.flatten()), "gather the scores"), found.shape)

    how = output.how_computed(device, ranks, kernel)
    if ranks.rank == 0:
        scores = [{"loss": float(nll), "targets": int(targets), "correct": int(hits)} for nll, targets, hits in found]
        output.write_lines(job.output / "scores.jsonl", scores)
        output.write_summary(job.output, how)
    return how


def _read_rows(path: Path) -> list[Row]:
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            try:
                value = json.loads(line)
                input_ids = np.array(value["input_ids"], dtype=np.int64)
                labels = np.array(value["labels"], dtype=np.int64)
            except (ValueError, KeyError, TypeError) as error:
                raise JobFailure("internal", f"line {number + 1} of `{path}` is no row") from error
            if len(input_ids) != len(labels):
                raise JobFailure("internal", f"line {number + 1} of `{path}` has not as many labels as ids")
            rows.append(Row(number, input_ids, labels, [len(input_ids)] if len(input_ids) else []))
    return rows
