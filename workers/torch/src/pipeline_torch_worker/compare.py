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


class Proof:
    """Compares models on some documents."""

    def __init__(self, adapted: PeftModel, batches: Sequence[Batch], device: Device, voice: Voice) -> None:
        self._adapted, self._device, self._voice = adapted, device, voice
        self._documents = [document.input_ids[None] for batch in batches for document in batch.documents()]
        self._with_adapter: _Outputs | None = None
        self._from_files: _Outputs | None = None

    @torch.no_grad()
    def compare(self, stored: Callable[[], PreTrainedModel]) -> dict[str, Any]:
        """Compares the three; `stored` loads the merged checkpoint."""
        with_adapter = self._outputs(_base(self._adapted))
        with adapter.merged(self._adapted):
            in_memory = self._outputs(_base(self._adapted))
        from_files = self._outputs(stored())
        self._with_adapter, self._from_files = with_adapter, from_files
        return {
            "rows": len(self._documents),
            "positions": len(from_files.logits),
            "merged": _difference(with_adapter, from_files),
            "before_rounding": _difference(with_adapter, in_memory),
            "rounding": _difference(in_memory, from_files),
        }

    @torch.no_grad()
    def against_training(self, other: PeftModel, dtype: torch.dtype, other_is_trained: bool) -> dict[str, Any]:
        """How far two merges are from base with adapter as it was trained: the one in the files, and that into the base of `other`.

        Both are rounded to the dtype of the files. `compare` has been called before. `other` is no longer what it was.
        """
        assert self._with_adapter is not None and self._from_files is not None
        trained = self._outputs(_base(other)) if other_is_trained else self._with_adapter
        with adapter.merged(other):
            for parameter in _base(other).parameters():
                parameter.copy_(parameter.to(dtype))
            not_written = self._outputs(_base(other))
        names = ("original", "dequantized") if other_is_trained else ("dequantized", "original")
        found = {
            name: _deviation(trained, merge) for name, merge in zip(names, (self._from_files, not_written), strict=True)
        }
        return {"into": names[0], **found}

    def _outputs(self, model: PreTrainedModel) -> _Outputs:
        return _outputs(model, self._documents, self._device, self._voice)


def _base(adapted: PeftModel) -> PreTrainedModel:
    return cast(PreTrainedModel, adapted.get_base_model())


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


def _deviation(trained: _Outputs, merged: _Outputs) -> dict[str, Any]:
    found = _difference(trained, merged)
    return {
        "max_abs_logit_difference": found["logits"]["max_abs_difference"],
        "max_abs_logit": found["logits"]["max_abs"],
        "top_1_agreement": found["top_1_agreement"],
    }


def _distance(one: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    found = {"max_abs_difference": float((one - other).abs().max()), "max_abs": float(one.abs().max())}
    if not all(math.isfinite(value) for value in found.values()):
        raise JobFailure("numeric", "a model computes a value that is not finite")
    return found
