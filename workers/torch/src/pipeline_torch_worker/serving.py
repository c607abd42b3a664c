"""Logits of sequences that grow together, as requests ask for them; which tokens follow is chosen on the other side.

A batch begins with its prompts, of one adapter, and grows by as many tokens in each row. Rows may leave it and none joins it.
Several batches may be open at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from . import computing
from .adapter import Adapters
from .device import Device
from .events import Voice
from .failure import JobFailure, failure_of, messages
from .generate import CachedModel, Sequences
from .job import ServeJob
from .model import load, read_config
from .parallel import Ranks
from .precision import COMPUTE_TYPES
from .requests import CLOSE, Request, Requests


def run(job: ServeJob, device: Device, ranks: Ranks, voice: Voice, requests: Requests) -> None:
    """Serves requests until the one to close."""
    config = read_config(job.model)
    loaded = load(job.model, config, COMPUTE_TYPES[job.dtype], None, job.quantize, device.torch)
    torch.nn.Module.to(loaded, device.torch)
    model = CachedModel(loaded, config, job.dtype, device)
    served = Served(model, Adapters(loaded), voice)
    described = computing.describe(device, ranks, str(config._attn_implementation))
    voice.answer({**described, "vocab_size": config.get_text_config().vocab_size, "is_alone": model.is_alone})
    while (request := requests.next()).name != CLOSE:
        try:
            served.serve(request)
        except Exception as error:
            failure = failure_of(error)
            if failure.cause == "device_out_of_memory":
                failure.help = "lower --max-concurrency or --max-model-len"
            raise failure from error


class Served:
    """A model with its adapters and the batches in progress."""

    def __init__(self, model: CachedModel, adapters: Adapters, voice: Voice) -> None:
        self._model, self._adapters, self._voice = model, adapters, voice
        self._batches: dict[int, tuple[str | None, Sequences]] = {}

    def serve(self, request: Request) -> None:
        """Does what a request says."""
        fields = request.fields
        if request.name == "load_adapter":
            self._voice.answer({"error": self._load(fields["adapter"], Path(fields["folder"]))})
        elif request.name == "unload_adapter":
            self._adapters.unload(fields["adapter"])
        elif request.name == "begin_batch":
            self._batches[fields["batch"]] = fields["adapter"], Sequences(self._model, fields["prompts"])
            self._answer(fields)
        elif request.name == "next_tokens":
            _, sequences = self._batches[fields["batch"]]
            sequences.keep(fields["rows"])
            sequences.append(fields["tokens"])
            self._answer(fields)
        elif request.name == "end_batch":
            del self._batches[fields["batch"]]
        else:
            raise JobFailure("internal", f"there is no request `{request.name}`")

    def _load(self, name: str, folder: Path) -> str | None:
        """Why an adapter cannot be loaded, where it cannot."""
        try:
            self._adapters.load(name, folder)
        except JobFailure as failure:
            return ": ".join(messages(failure))
        return None

    def _answer(self, fields: dict[str, Any]) -> None:
        adapter, sequences = self._batches[fields["batch"]]
        self._adapters.select(adapter)
        logits = sequences.logits(each=fields["each"])
        self._voice.answer({"shape": list(logits.shape)}, logits.astype("<f4", copy=False).tobytes())
