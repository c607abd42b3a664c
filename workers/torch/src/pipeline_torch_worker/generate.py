"""Completions of prompts, several at a time, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from .architecture import cache_argument, positions_of, shares_state, turns_by_length
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
        return cls(tokens, int(prompt["seed"]), int(prompt["row"]))


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


class CachedModel:
    """A model that sequences grow on, each over a cache of what came before."""

    def __init__(self, model: PreTrainedModel, config: PretrainedConfig, dtype: DType, device: Device) -> None:
        self._model, self._config, self._dtype, self._device = model, config, dtype, device
        self.turn = _turning_length(config)
        self.positions = positions_of(config)
        state = shares_state(model)
        # Padding would enter the state of a model that has one.
        self.is_alone = turns_by_length(config) or state is not None
        # Alone a prompt has no padding, and layers with a state of their own mistake a mask for more tokens.
        self._is_masked = state is None
        self._cache = cache_argument(model)

    def empty_cache(self) -> DynamicCache:
        """What a sequence begins with."""
        return DynamicCache(config=self._config)

    @torch.no_grad()
    def logits(self, ids: torch.Tensor, pads: Sequence[int], length: int, cache: DynamicCache, kept: int) -> Any:
        """The logits after the last tokens of each row, `[rows, kept, vocabulary]`, as numpy has them.

        `ids` are the last tokens of rows of this length, which begin with so much padding; the cache has those before.
        """
        places, before = torch.arange(length), torch.tensor(pads)[:, None]
        mask = places >= before
        positions = (places - before).clamp_min(0)[:, -ids.shape[1] :]
        at = self._device.torch
        with computing_in(self._dtype, at):
            found = self._model(
                input_ids=ids.to(at),
                attention_mask=mask.to(at) if self._is_masked else None,
                position_ids=positions.to(at),
                **{self._cache: cache},
                use_cache=True,
                logits_to_keep=kept,
            )
        return found.logits[:, -kept:].float().cpu().numpy()


class Sequences:
    """Sequences that grow together, always by as many tokens."""

    def __init__(self, model: CachedModel, prompts: Sequence[Sequence[int]]) -> None:
        self._model, self._cache = model, model.empty_cache()
        padded_to = max(len(prompt) for prompt in prompts)
        # Prompts end together: padding stands before them.
        self._pads = [padded_to - len(prompt) for prompt in prompts]
        self._tokens = [[0] * pad + list(prompt) for pad, prompt in zip(self._pads, prompts, strict=True)]
        self._read = 0

    def keep(self, rows: Sequence[int]) -> None:
        """Goes on with these rows alone."""
        if list(rows) != list(range(len(self._tokens))):
            self._tokens, self._pads = [self._tokens[row] for row in rows], [self._pads[row] for row in rows]
            self._cache.batch_select_indices(torch.tensor(rows))

    def append(self, tokens: Sequence[Sequence[int]]) -> None:
        """Adds tokens to each row."""
        for row, new in zip(self._tokens, tokens, strict=True):
            row.extend(new)

    def logits(self, each: bool = False) -> Any:
        """The logits after the last token of each row, or after each one since the last time: `[rows, tokens, vocabulary]`."""
        length, turn = len(self._tokens[0]), self._model.turn
        kept = length - self._read if each else 1
        if turn is not None and self._read <= turn < length:
            # From here on every position is turned in another way.
            self._cache, self._read = self._model.empty_cache(), 0
        ids = torch.tensor([row[self._read :] for row in self._tokens])
        self._read = length
        return self._model.logits(ids, self._pads, length, self._cache, kept)


class Generator:
    """Completes prompts with a model."""

    def __init__(self, model: CachedModel) -> None:
        self._model = model

    def complete(self, prompts: Sequence[Mapping[str, Any]], options: Options) -> list[dict[str, object]]:
        """Completes prompts, which grow together."""
        growing = [_Growing.of(prompt) for prompt in prompts]
        positions = self._model.positions
        longest = max((len(prompt.tokens) for prompt in growing), default=0)
        if positions is not None and longest >= positions:
            raise JobFailure("bad_data", f"a prompt has {longest} tokens, and the model has {positions} positions")
        for batch in [[prompt] for prompt in growing] if self._model.is_alone else [growing]:
            if batch:
                self._grow_together(batch, options)
        return [{"output_ids": prompt.answer, "ended": prompt.ended} for prompt in growing]

    def _grow_together(self, batch: Sequence[_Growing], options: Options) -> None:
        """Lets completions grow to their ends."""
        sampling = Sampling(
            options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty
        )
        sequences = Sequences(self._model, [growing.tokens for growing in batch])
        while True:
            for growing, of_row in zip(batch, sequences.logits()[:, -1], strict=True):
                _grow(growing, of_row, sampling, options, self._model.positions)
            # What has ended may be at the last of its positions.
            going = [row for row, growing in enumerate(batch) if growing.ended is None]
            if not going:
                return
            sequences.keep(going)
            batch = [batch[row] for row in going]
            sequences.append([growing.tokens[-1:] for growing in batch])


def _grow(growing: _Growing, logits: Any, sampling: Sampling, options: Options, positions: int | None) -> None:
    """Adds the next token to a completion, or ends it."""
    banned = options.stop_ids if len(growing.answer) < options.min_new_tokens else []
    token = sampling.choose(logits, growing.tokens, banned, growing.seed, growing.row)
    growing.tokens.append(token)
    if token in options.stop_ids:
        growing.ended = STOP
        return
    growing.answer.append(token)
    if len(growing.answer) == options.max_new_tokens or len(growing.tokens) == positions:
        growing.ended = LENGTH


def _turning_length(config: PretrainedConfig) -> int | None:
    """The length beyond which a longer text is turned by other factors."""
    if not turns_by_length(config):
        return None
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return None if original is None else int(original)
