"""Completions of prompts, several at a time, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from .architecture import cache_argument, shares_state, turns_by_length
from .device import Device
from .failure import JobFailure
from .job import DType
from .precision import computing_in
from .sampling import Sampling

STOP, LENGTH = "stop", "length"


@dataclass
class _Growing:
    """A prompt with its completion so far."""

    tokens: list[int]
    prompt_length: int
    seed: int
    row: int
    ended: str | None = None
    answer: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, prompt: Mapping[str, Any]) -> _Growing:
        """Reads a prompt of a request."""
        tokens = [int(token) for token in prompt["input_ids"]]
        if not tokens:
            raise JobFailure("bad_data", "a prompt has no token: there is nothing to complete")
        return cls(tokens, len(tokens), int(prompt["seed"]), int(prompt["row"]))


@dataclass(frozen=True)
class Options:
    """How completions are chosen, and when they end."""

    max_new_tokens: int
    min_new_tokens: int
    stop_ids: list[int]
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None


class Generator:
    """A model that completes prompts."""

    def __init__(self, model: PreTrainedModel, config: PretrainedConfig, dtype: DType, device: Device) -> None:
        self._model, self._config, self._dtype, self._device = model, config, dtype, device
        self._turn = _turning_length(config)
        state = shares_state(model)
        # Padding would enter the state of a model that has one.
        self._alone = turns_by_length(config) or state is not None
        # Alone a prompt has no padding, and layers with a state of their own mistake a mask for more tokens.
        self._is_masked = state is None
        self._cache = cache_argument(model)

    @torch.no_grad()
    def complete(self, prompts: Sequence[Mapping[str, Any]], options: Options) -> list[dict[str, object]]:
        """Completes prompts, which grow together."""
        growing = [_Growing.of(prompt) for prompt in prompts]
        for batch in [[prompt] for prompt in growing] if self._alone else [growing]:
            if batch:
                self._grow_together(batch, options)
        return [{"output_ids": prompt.answer, "ended": prompt.ended} for prompt in growing]

    def _grow_together(self, batch: Sequence[_Growing], options: Options) -> None:
        """Lets completions grow to their ends."""
        sampling = Sampling(
            options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty
        )
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
                    _grow(growing, of_row, sampling, options)
            if all(growing.ended for growing in batch):
                return
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
        with computing_in(self._dtype, at):
            found = self._model(
                input_ids=ids.to(at),
                attention_mask=mask.to(at) if self._is_masked else None,
                position_ids=positions.to(at),
                **{self._cache: cache},
                use_cache=True,
                logits_to_keep=1,
            )
        return found.logits[:, -1].float().cpu().numpy()


def _grow(growing: _Growing, logits: Any, sampling: Sampling, options: Options) -> None:
    """Adds the next token to a completion, or ends it."""
    banned = options.stop_ids if len(growing.answer) < options.min_new_tokens else []
    token = sampling.choose(logits, growing.tokens, banned, growing.seed, growing.row)
    growing.tokens.append(token)
    if token in options.stop_ids:
        growing.ended = STOP
        return
    growing.answer.append(token)
    if len(growing.answer) == options.max_new_tokens:
        growing.ended = LENGTH


def _turning_length(config: PretrainedConfig) -> int | None:
    """The length beyond which a longer text is turned by other factors."""
    if not turns_by_length(config):
        return None
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return None if original is None else int(original)
