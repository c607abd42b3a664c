"""The proof of a merge, for an architecture that the native backend does not run: what base with adapter computes, what it computes
with the adapter merged in memory by PEFT, and what the merged checkpoint does.

The first two differ by the order of sums alone, the last two by how the merged weights were rounded to be stored. All are in f32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedModel

from . import adapter
from .data import Batch
from .device import Device
from .events import Voice
from .failure import JobFailure

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True)
class _Outputs:
    """What a model computes of some documents: the residual stream after each layer, `[tokens, hidden_size]`, and the logits."""

    layers: list[torch.Tensor]
    logits: torch.Tensor


@torch.no_grad()
def compare(
    adapted: PeftModel, stored: Callable[[], PreTrainedModel], batches: Sequence[Batch], device: Device, voice: Voice
) -> dict[str, Any]:
    """Compares the three on some documents; `stored` loads the merged checkpoint."""
    documents = [document.input_ids[None] for batch in batches for document in batch.documents()]
    model = cast(PreTrainedModel, adapted.get_base_model())
    with_adapter = _outputs(model, documents, device, voice)
    with adapter.merged(adapted):
        in_memory = _outputs(model, documents, device, voice)
    from_files = _outputs(stored(), documents, device, voice)
    return {
        "rows": len(documents),
        "positions": len(from_files.logits),
        "merged": _difference(with_adapter, from_files),
        "before_rounding": _difference(with_adapter, in_memory),
        "rounding": _difference(in_memory, from_files),
    }


def _outputs(model: PreTrainedModel, documents: list[torch.Tensor], device: Device, voice: Voice) -> _Outputs:
    model.to(device.torch)  # type: ignore[arg-type]
    layers: list[list[torch.Tensor]] = []
    logits: list[torch.Tensor] = []
    for number, ids in enumerate(documents):
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
