"""The proof of a merge, for an architecture that the native backend does not run: what base with adapter computes, what it computes
with the adapter merged in memory by PEFT, and what the merged checkpoint does.

The first two differ by the order of sums alone, the last two by how the merged weights were rounded to be stored. All are in f32.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from . import adapter, output
from .device import Device
from .events import Voice
from .failure import JobFailure
from .job import CompareJob
from .model import load_base, read_config
from .parallel import Ranks
from .precision import COMPUTE_TYPES
from .stopping import StopRequest


@dataclass(frozen=True)
class _Outputs:
    """What a model computes of some documents: the residual stream after each layer, `[tokens, hidden_size]`, and the logits."""

    layers: list[torch.Tensor]
    logits: torch.Tensor


@torch.no_grad()
def run(job: CompareJob, device: Device, ranks: Ranks, voice: Voice, stop: StopRequest) -> dict[str, object]:
    """Compares the three; how it was computed."""
    if ranks.world > 1:
        raise JobFailure("bad_parameters", "models are compared by one rank")
    with job.rows.open(encoding="utf-8") as lines:
        documents = [torch.tensor([json.loads(line)["input_ids"]]) for line in lines]
    base = _load(job.model, job)
    adapted = adapter.attach(base, job.adapter, trained=False)
    with_adapter = _outputs(base, documents, device, voice, stop)
    in_memory = _outputs(cast(PreTrainedModel, adapted.merge_and_unload()), documents, device, voice, stop)
    del base, adapted
    stored = _outputs(_load(job.merged, job), documents, device, voice, stop)
    comparison = {
        "rows": len(documents),
        "positions": len(stored.logits),
        "merged": _difference(with_adapter, stored),
        "before_rounding": _difference(with_adapter, in_memory),
        "rounding": _difference(in_memory, stored),
    }
    how = output.how_computed(device, ranks, "transformers")
    (job.output / "comparison.json").write_text(json.dumps(comparison, indent=2, allow_nan=False) + "\n")
    output.write_summary(job.output, how)
    return how


def _load(folder: Path, job: CompareJob) -> PreTrainedModel:
    return load_base(folder, read_config(folder), COMPUTE_TYPES[job.dtype], attention=None)


def _outputs(
    model: PreTrainedModel, documents: list[torch.Tensor], device: Device, voice: Voice, stop: StopRequest
) -> _Outputs:
    model.to(device.torch)  # type: ignore[arg-type]
    layers: list[list[torch.Tensor]] = []
    logits: list[torch.Tensor] = []
    for number, ids in enumerate(documents):
        if stop:
            raise JobFailure("cancelled", "stopped while models were compared", "run again")
        found = model(input_ids=ids.to(device.torch), use_cache=False, output_hidden_states=True)
        # The first is the embedding, before any layer.
        of_layers = [hidden[0].float().cpu() for hidden in found.hidden_states[1:]]
        layers = layers or [[] for _ in of_layers]
        for layer, hidden in zip(layers, of_layers, strict=True):
            layer.append(hidden)
        logits.append(found.logits[0].float().cpu())
        voice.progress("rows", number + 1, len(documents))
    return _Outputs([torch.cat(layer) for layer in layers], torch.cat(logits))


def _difference(one: _Outputs, other: _Outputs) -> dict[str, Any]:
    same = one.logits.argmax(dim=-1) == other.logits.argmax(dim=-1)
    return {
        "layers": [_distance(*pair) for pair in zip(one.layers, other.layers, strict=True)],
        "logits": _distance(one.logits, other.logits),
        "top_1_agreement": float(same.float().mean()),
    }


def _distance(one: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    found = {"max_abs_difference": float((one - other).abs().max()), "max_abs": float(one.abs().max())}
    if not all(math.isfinite(value) for value in found.values()):
        raise JobFailure("numeric", "a model computes a value that is not finite")
    return found
