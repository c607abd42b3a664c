"""Answers to prompts, several at a time, with a cache of keys and values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from . import adapter, output
from .architecture import cache_argument, shares_state, turns_by_length
from .device import Device
from .events import Voice
from .failure import JobFailure
from .job import GenerateJob
from .model import load_base, read_config
from .parallel import Ranks
from .precision import COMPUTE_TYPES, computing_in
from .sampling import Sampling
from .stopping import StopRequest

STOP, LENGTH = "stop", "length"
# How an answer's end goes over the wire, where a token is its id.
_ENDED_BY_STOP, _NOTHING = -1, -2


@dataclass
class _Growing:
    """A prompt with its answer so far."""

    number: int
    tokens: list[int]
    prompt_length: int
    seed: int
    row: int
    ended: str | None = None
    answer: list[int] = field(default_factory=list)


@torch.no_grad()
def run(job: GenerateJob, device: Device, ranks: Ranks, voice: Voice, stop: StopRequest) -> dict[str, object]:
    """Answers all prompts, each rank its share; how it was computed."""
    prompts = _read_prompts(job.prompts)
    config = read_config(job.model)
    # Of one length in a batch nothing is left to choose: transformers takes what the family has.
    model = load_base(job.model, config, COMPUTE_TYPES[job.dtype], attention=None)
    if job.adapter is not None:
        adapter.attach(model, job.adapter, trained=False)
    model.to(device.torch)  # type: ignore[arg-type]
    answering = _Answering(job, model, config, device, stop)

    ours = prompts[ranks.rank :: ranks.world]
    # Those of about one length together, so that little is padded.
    ours.sort(key=lambda prompt: prompt.prompt_length)
    # Padding would enter the state of a model that has one.
    at_once = 1 if turns_by_length(config) or shares_state(model) else job.batch_size
    for start in range(0, len(ours), at_once):
        answering.answer(ours[start : start + at_once])
        voice.progress("prompts", min(len(prompts), (start + at_once) * ranks.world), len(prompts))
    answers = _gather(prompts, ours, job.max_new_tokens, ranks)

    how = output.how_computed(device, ranks, str(config._attn_implementation))
    if ranks.rank == 0:
        output.write_lines(job.output / "answers.jsonl", answers)
        output.write_summary(job.output, how)
    return how


class _Answering:
    """A model that answers."""

    def __init__(
        self, job: GenerateJob, model: PreTrainedModel, config: PretrainedConfig, device: Device, stop: StopRequest
    ) -> None:
        self._job, self._model, self._config, self._device, self._stop = job, model, config, device, stop
        self._sampling = Sampling(job.temperature, job.top_k, job.top_p, job.min_p, job.repetition_penalty)
        self._turn = _turning_length(config)
        self._cache = cache_argument(model)
        # Alone a prompt has no padding, and layers with a state of their own mistake a mask for more tokens.
        self._is_masked = shares_state(model) is None

    def answer(self, batch: Sequence[_Growing]) -> None:
        """Lets the answers of a batch grow to their ends."""
        cache = DynamicCache(config=self._config)
        padded_to = max(growing.prompt_length for growing in batch)
        # Prompts end together: padding stands before them.
        pads = torch.tensor([padded_to - growing.prompt_length for growing in batch])
        ids = torch.tensor([[0] * int(pad) + growing.tokens for pad, growing in zip(pads, batch, strict=True)])
        length = padded_to
        while True:
            logits = self._logits(ids, pads, length, cache)
            for growing, of_row in zip(batch, logits, strict=True):
                if growing.ended is None:
                    self._grow(growing, of_row)
            if all(growing.ended for growing in batch):
                return
            if self._stop:
                raise JobFailure("cancelled", "stopped while answers were growing", "run again")
            length += 1
            ids = torch.tensor([[growing.tokens[-1]] for growing in batch])
            if self._turn is not None and length == self._turn + 1:
                # From here on every position is turned in another way.
                cache, ids = DynamicCache(config=self._config), torch.tensor([growing.tokens for growing in batch])

    def _logits(self, ids: torch.Tensor, pads: torch.Tensor, length: int, cache: DynamicCache) -> Any:
        """The logits after the last token of each row, as numpy has them."""
        places = torch.arange(length)
        mask = places >= pads[:, None]
        positions = (places - pads[:, None]).clamp_min(0)[:, -ids.shape[1] :]
        at = self._device.torch
        with computing_in(self._job.dtype, at):
            found = self._model(
                input_ids=ids.to(at),
                attention_mask=mask.to(at) if self._is_masked else None,
                position_ids=positions.to(at),
                **{self._cache: cache},
                use_cache=True,
                logits_to_keep=1,
            )
        return found.logits[:, -1].float().cpu().numpy()

    def _grow(self, growing: _Growing, logits: Any) -> None:
        job = self._job
        banned = job.stop_ids if len(growing.answer) < job.min_new_tokens else []
        token = self._sampling.choose(logits, growing.tokens, banned, growing.seed, growing.row)
        growing.tokens.append(token)
        if token in job.stop_ids:
            growing.ended = STOP
            return
        growing.answer.append(token)
        if len(growing.answer) == job.max_new_tokens:
            growing.ended = LENGTH


def _turning_length(config: PretrainedConfig) -> int | None:
    """The length beyond which a longer text is turned by other factors."""
    if not turns_by_length(config):
        return None
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return None if original is None else int(original)


def _gather(all_: list[_Growing], ours: list[_Growing], most: int, ranks: Ranks) -> list[dict[str, object]]:
    """The answers of all ranks in the order of the prompts."""
    found = torch.zeros(len(all_), most + 1, dtype=torch.float64)
    for growing in ours:
        line = [*growing.answer, _ENDED_BY_STOP if growing.ended == STOP else _NOTHING]
        found[growing.number] = torch.tensor([*line, *[_NOTHING] * (most + 1 - len(line))])
    together = torch.tensor(ranks.sum(found.flatten().tolist(), "gather the answers")).view_as(found)
    answers: list[dict[str, object]] = []
    for line in together.to(torch.int64).tolist():
        ended = STOP if _ENDED_BY_STOP in line else LENGTH
        answers.append({"output_ids": [token for token in line if token >= 0], "ended": ended})
    return answers


def _read_prompts(path: Path) -> list[_Growing]:
    prompts = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            try:
                value = json.loads(line)
                tokens = [int(token) for token in value["input_ids"]]
                seed, row = int(value["seed"]), int(value.get("row", 0))
            except (ValueError, KeyError, TypeError) as error:
                raise JobFailure("internal", f"line {number + 1} of `{path}` is no prompt") from error
            if not tokens:
                raise JobFailure("bad_data", f"prompt {number} has no token: there is nothing to answer to")
            prompts.append(_Growing(number, tokens, len(tokens), seed, row))
    return prompts
