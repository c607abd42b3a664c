"""Scores and completions of a loaded model, as requests ask for them; it may be one in training."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PretrainedConfig, PreTrainedModel

from . import adapter, computing
from .architecture import hands_attention_over, shares_state, turns_by_length
from .attention import NAME, choose
from .compare import Proof
from .data import Batch, read_batches
from .device import Device
from .draws import Draws
from .events import Voice
from .generate import CachedModel, Generator, Options
from .job import DType, InferJob, QuantizeSettings
from .model import DocumentLoss, load, load_base, read_config
from .parallel import Ranks
from .precision import COMPUTE_TYPES
from .requests import CLOSE, Request, Requests
from .score import score_rows

if TYPE_CHECKING:
    from peft import PeftModel


def run(job: InferJob, device: Device, ranks: Ranks, voice: Voice, requests: Requests) -> None:
    """Serves requests until the one to close."""
    config = read_config(job.model)
    kernel = choose("auto", device, job.dtype, config)
    # To complete prompts and to be compared, a model has the attention of its family.
    model = load(job.model, config, COMPUTE_TYPES[job.dtype], None, job.quantize, device.torch)
    widened = _widen(model) if job.widen else []
    adapted = None if job.adapter is None else adapter.attach(model, job.adapter, trained=False)
    if adapted is not None:
        adapter.fuse_products(adapted)
    inference = Inference(DocumentLoss(model, kernel, Draws(seed=0)).to(device.torch), config, job.dtype, device, ranks)
    voice.answer(computing.describe(device, ranks, kernel))
    while (request := requests.next()).name != CLOSE:
        if request.name == "widened_layers":
            voice.answer({"layers": widened})
        elif request.name == "compare":
            assert adapted is not None, "a merge is of an adapter"
            inference.attend_as_the_family()
            (batches,) = read_batches(request.fields["ranks"], request.payload)
            voice.answer(_compare(job, adapted, request.fields, batches, device, voice))
        else:
            voice.answer(inference.serve(request))


def _widen(model: PreTrainedModel) -> list[str]:
    # Not imported where nothing is quantised: bitsandbytes need not be there.
    from .quantization import widen

    return widen(model)


def _compare(
    job: InferJob, adapted: PeftModel, fields: dict[str, Any], batches: Sequence[Batch], device: Device, voice: Voice
) -> dict[str, Any]:
    """The proof of a merge. Of an adapter that was trained on a quantised base it has a part about the base not merged into."""
    dtype, merged = COMPUTE_TYPES[job.dtype], Path(fields["merged"])
    config = read_config(merged)
    stored = functools.partial(load_base, merged, config, dtype, attention=None)
    proof = Proof(adapted, batches, device, voice)
    found = proof.compare(stored)
    if fields.get("trained_on") is None:
        return found
    quantize = None if job.widen else QuantizeSettings(**fields["trained_on"])
    other = load(job.model, read_config(job.model), dtype, None, quantize, device.torch)
    if quantize is not None:
        _widen(other)
    assert job.adapter is not None
    with_adapter = adapter.attach(other, job.adapter, trained=False)
    its_dtype = cast(torch.dtype, config.dtype or dtype)
    found["against_training"] = proof.against_training(with_adapter, its_dtype, other_is_trained=quantize is not None)
    return found


class Inference:
    """A loaded model that is scored and completes prompts, all of it on every rank."""

    def __init__(
        self, loss: DocumentLoss, config: PretrainedConfig, dtype: DType, device: Device, ranks: Ranks
    ) -> None:
        model = loss.model
        self._model, self._loss, self._dtype, self._device, self._ranks = model, loss, dtype, device, ranks
        state = shares_state(model)
        self._apart = state is not None or turns_by_length(config)
        # Another architecture has its own attention for everything.
        self._is_switched = state is None and hands_attention_over(config)
        self._of_family = config._attn_implementation
        if self._of_family == NAME:
            # It was loaded to be trained.
            is_plain = getattr(config, "attn_logit_softcapping", None) is None and model._supports_sdpa
            self._of_family = "sdpa" if is_plain else "eager"
        self._config = config

    @functools.cached_property
    def _generator(self) -> Generator:
        # A model without a cache can be scored all the same.
        return Generator(CachedModel(self._model, self._config, self._dtype, self._device))

    def serve(self, request: Request) -> dict[str, Any]:
        """The results of each rank, and the most memory that each has had."""
        found = self._score(request) if request.name == "score_rows" else self._generate(request)
        peaks = self._ranks.gather(self._device.peak_memory_bytes(), "gather the memory used")
        results = self._ranks.gather_lists(found, "gather results")
        return {"ranks": results, "peak_memory_bytes": [int(peak) for peak in peaks]}

    def attend_by_documents(self) -> None:
        """Cuts attention between documents from here on."""
        if self._is_switched:
            self._model.set_attn_implementation(NAME)

    def attend_as_the_family(self) -> None:
        """Lets transformers attend, which has a cache and padding."""
        if self._is_switched:
            self._model.set_attn_implementation(self._of_family)

    def _score(self, request: Request) -> list[Any]:
        self.attend_by_documents()
        batches = read_batches(request.fields["ranks"], request.payload)[self._ranks.rank]
        scores = [
            score_rows(self._loss, batch, self._apart, self._dtype, self._device) for batch in batches if batch.tokens
        ]
        return [score for of_batch in scores for score in of_batch]

    def _generate(self, request: Request) -> list[Any]:
        self.attend_as_the_family()
        options = Options(**request.fields["options"])
        return self._generator.complete(request.fields["prompts"][self._ranks.rank], options)
