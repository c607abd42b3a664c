"""Scores and completions of a loaded model, as requests ask for them; it may be one in training."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from . import adapter, computing
from .attention import NAME, Kernel, choose
from .data import read_batches
from .device import Device
from .draws import Draws
from .events import Voice
from .generate import Generator, Options
from .job import DType, InferJob
from .model import DocumentLoss, load_base, read_config, turns_by_length
from .parallel import Ranks
from .precision import COMPUTE_TYPES
from .requests import CLOSE, Request, Requests
from .score import score_rows


def run(job: InferJob, device: Device, ranks: Ranks, voice: Voice, requests: Requests) -> None:
    """Serves requests until the one to close."""
    config = read_config(job.model)
    kernel: Kernel = choose("auto", device, job.dtype, config)
    # Of one length in a batch nothing is left to choose for completions: transformers takes what the family has.
    model = load_base(job.model, config, COMPUTE_TYPES[job.dtype], attention=None)
    if job.adapter is not None:
        adapter.attach(model, job.adapter, trained=False)
    loss = DocumentLoss(model, kernel, Draws(seed=0)).to(device.torch)
    inference = Inference(model, loss, config, job.dtype, device, ranks)
    voice.answer(computing.describe(device, ranks, kernel))
    while (request := requests.next()).name != CLOSE:
        voice.answer(inference.serve(request))


class Inference:
    """A loaded model that is scored and completes prompts, all of it on every rank."""

    def __init__(
        self,
        model: PreTrainedModel,
        loss: DocumentLoss,
        config: PretrainedConfig,
        dtype: DType,
        device: Device,
        ranks: Ranks,
    ) -> None:
        self._model, self._loss, self._dtype, self._device, self._ranks = model, loss, dtype, device, ranks
        self._apart = turns_by_length(config)
        self._of_family = config._attn_implementation
        if self._of_family == NAME:
            # It was loaded to be trained.
            self._of_family = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
        self._generator = Generator(model, config, dtype, device)

    def serve(self, request: Request) -> dict[str, Any]:
        """The results of each rank, and the most memory that each has had."""
        found = self._score(request) if request.name == "score_rows" else self._generate(request)
        peaks = self._ranks.gather(self._device.peak_memory_bytes(), "gather the memory used")
        results = self._ranks.gather_lists(found, "gather results")
        return {"ranks": results, "peak_memory_bytes": [int(peak) for peak in peaks]}

    def _score(self, request: Request) -> list[Any]:
        self._model.set_attn_implementation(NAME)
        batches = read_batches(request.fields["ranks"], request.payload)[self._ranks.rank]
        scores = [
            score_rows(self._loss, batch, self._apart, self._dtype, self._device) for batch in batches if batch.tokens
        ]
        return [score for of_batch in scores for score in of_batch]

    def _generate(self, request: Request) -> list[Any]:
        self._model.set_attn_implementation(self._of_family)
        options = Options(**request.fields["options"])
        return self._generator.complete(request.fields["prompts"][self._ranks.rank], options)
