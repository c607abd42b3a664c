"""Random draws that are addressed, not carried: each is a function of a seed and of what it is for.

Nothing here has state that a checkpoint would have to save, and a run on more ranks draws the same numbers. The generator is
Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011), and the addresses are those of the native
worker (`model/src/random.rs`), so that both draw the same masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

DROPOUT, SAMPLING = 4, 5
_LOW = 0xFFFFFFFF
_Word = TypeVar("_Word", int, torch.Tensor)


def stream_of(seed: int, purpose: int, step: int, row: int, layer: int = 0, module: int = 0) -> list[int]:
    """The four words that the stream of draws at an address begins with: its key and the upper half of its counter."""
    mixed = _philox([step & _LOW, step >> 32, row & _LOW, row >> 32], [seed & _LOW, seed >> 32])
    place = [mixed[0] ^ purpose, mixed[1] ^ layer, mixed[2] ^ module, mixed[3]]
    return _philox(place, [seed & _LOW, (seed >> 32) ^ 1])


def uniform(seed: int, purpose: int, step: int, row: int) -> float:
    """The first number in `[0, 1)` of a stream, with 53 random bits."""
    key0, key1, tag0, tag1 = stream_of(seed, purpose, step, row)
    low, high, _, _ = _philox([0, 0, tag0, tag1], [key0, key1])
    return float(((high << 32 | low) >> 11) / (1 << 53))


class Draws:
    """Which draws dropout makes now: those of an optimizer step, for tokens at these places of the data."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = 0
        self.rows = torch.empty(0, dtype=torch.int64)
        self.tokens = torch.empty(0, dtype=torch.int64)

    @contextmanager
    def at(self, rows: torch.Tensor, tokens: torch.Tensor) -> Iterator[None]:
        """Draws for other tokens meanwhile."""
        before = self.rows, self.tokens
        self.rows, self.tokens = rows, tokens
        try:
            yield
        finally:
            self.rows, self.tokens = before


class AddressedDropout(torch.nn.Module):
    """Dropout whose mask is a function of seed, step, the module's name, the token's row and number in it, and the column.

    So it is the same however a step is cut into micro-batches and over ranks, and computing a layer again draws it again.
    """

    def __init__(self, draws: Draws, module: str, probability: float) -> None:
        super().__init__()
        self._draws = draws
        self._name = fnv1a(module)
        self._probability = probability

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is `(1, tokens, columns)`; what is kept is scaled so that the mean stays."""
        if not self.training:
            return x
        kept = self._kept(x.shape[-1]).view(1, -1, x.shape[-1])
        return x * kept.to(device=x.device, dtype=x.dtype) / (1 - self._probability)

    def _kept(self, columns: int) -> torch.Tensor:
        """Element `(token, column)` is dropped if word `column % 4` of block `token · ⌈columns/4⌉ + ⌊column/4⌋` is below p·2³²."""
        draws = self._draws
        rows, of_row = torch.unique(draws.rows, return_inverse=True)
        streams = [
            stream_of(draws.seed, DROPOUT, draws.step, int(row), self._name >> 32, self._name & _LOW) for row in rows
        ]
        key0, key1, tag0, tag1 = torch.tensor(streams, device=rows.device)[of_row].T.unsqueeze(-1)
        per_token = -(-columns // 4)
        block = draws.tokens[:, None] * per_token + torch.arange(per_token, device=rows.device)
        words = _philox([block & _LOW, block >> 32, tag0, tag1], [key0, key1])
        words = [word.expand_as(block) for word in words]
        drawn = torch.stack(words, dim=-1).flatten(1)[:, :columns]
        return drawn >= round(self._probability * 2**32)


def fnv1a(text: str) -> int:
    """64-bit FNV-1a: names become numbers in the same way on every machine."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value


def _philox(counter: list[_Word], key: list[_Word]) -> list[_Word]:
    """128 bits of counter and 64 of key to 128 random bits, in words of 32 that are held in 64: single ones, or tensors of them."""
    a, b, c, d = counter
    key0, key1 = key
    for _ in range(10):
        first_high, first_low = _product(a, 0xD2511F53)
        second_high, second_low = _product(c, 0xCD9E8D57)
        a, b, c, d = second_high ^ b ^ key0, second_low, first_high ^ d ^ key1, first_low
        key0, key1 = (key0 + 0x9E3779B9) & _LOW, (key1 + 0xBB67AE85) & _LOW
    return [a, b, c, d]


def _product(word: _Word, factor: int) -> tuple[_Word, _Word]:
    """Upper and lower half of a product of 64 bits, by halves of `word`: torch's whole numbers have a sign."""
    low = (word & 0xFFFF) * factor
    high = (word >> 16) * factor + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
