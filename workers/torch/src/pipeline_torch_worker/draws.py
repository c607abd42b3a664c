"""Random draws that are addressed, not carried: each is a function of a seed and of what it is for.

Nothing here has state that a checkpoint would have to save, and a run on more ranks draws the same numbers. The generator is
Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011), and the addresses are those of the native
worker (`model/src/random.rs`), so that both draw the same masks.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

DROPOUT, SAMPLING = 4, 5
_LOW = 0xFFFFFFFF
_Word = int | torch.Tensor


def stream_of(seed: int, purpose: int, step: int, row: _Word, layer: _Word = 0, module: _Word = 0) -> list[Any]:
    """The four words that the stream of draws at an address begins with: its key and the upper half of its counter.

    Whole numbers, or tensors of as many addresses as rows, layers and modules give together.
    """
    mixed = _philox([step & _LOW, step >> 32, row & _LOW, row >> 32], [seed & _LOW, seed >> 32])
    place = [mixed[0] ^ purpose, mixed[1] ^ layer, mixed[2] ^ module, mixed[3]]
    return _philox(place, [seed & _LOW, (seed >> 32) ^ 1])


def uniform(seed: int, purpose: int, step: int, row: int) -> float:
    """The first number in `[0, 1)` of a stream, with 53 random bits."""
    key0, key1, tag0, tag1 = stream_of(seed, purpose, step, row)
    low, high, _, _ = _philox([0, 0, tag0, tag1], [key0, key1])
    return float(((high << 32 | low) >> 11) / (1 << 53))


class Places:
    """Where tokens are in the data, by which draws for them are addressed."""

    def __init__(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        self.rows = rows
        """`[tokens]`: the row of each."""
        self.tokens = tokens
        """`[tokens]`: the number of each in its row."""
        self._streams: tuple[int, torch.Tensor] | None = None

    @functools.cached_property
    def _apart(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows, each once, on the processor; and the number in them of each token's."""
        rows, of_row = torch.unique(self.rows, return_inverse=True)
        return rows.cpu(), of_row

    def streams(self, draws: Draws, module: int) -> torch.Tensor:
        """`[tokens, 4]`: the four words that each token's stream begins with, in a module.

        Those of all modules are made at once: one by one they would take longer than a layer on a GPU.
        """
        rows, of_row = self._apart
        if self._streams is None or self._streams[0] != draws.step:
            names = torch.tensor(draws.modules)[:, None]
            words = stream_of(draws.seed, DROPOUT, draws.step, rows, (names >> 32) & _LOW, names & _LOW)
            shape = (len(names), len(rows))
            made = torch.stack([torch.as_tensor(word).expand(shape) for word in words], dim=-1)
            self._streams = draws.step, made.to(of_row.device)
        return self._streams[1][module][of_row]


class Draws:
    """Which draws dropout makes now: those of an optimizer step, for tokens at these places of the data."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = 0
        self.places = Places(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
        self.modules: list[int] = []
        """The names of modules with draws of their own, as numbers with a sign."""

    @contextmanager
    def at(self, places: Places) -> Iterator[None]:
        """Draws for other tokens meanwhile."""
        before, self.places = self.places, places
        try:
            yield
        finally:
            self.places = before


class AddressedDropout(torch.nn.Module):
    """Dropout whose mask is a function of seed, step, the module's name, the token's row and number in it, and the column.

    So it is the same however a step is cut into micro-batches and over ranks, and computing a layer again draws it again.
    """

    def __init__(self, draws: Draws, module: str, probability: float) -> None:
        super().__init__()
        self._draws = draws
        self._module = len(draws.modules)
        name = fnv1a(module)
        # torch's whole numbers have a sign.
        draws.modules.append(name - (1 << 64) if name >> 63 else name)
        self._probability = probability

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is `(1, tokens, columns)`; what is kept is scaled so that the mean stays."""
        if not self.training:
            return x
        places, threshold = self._draws.places, round(self._probability * 2**32)
        streams = places.streams(self._draws, self._module)
        kept = _masks(streams.device.type)(streams, places.tokens, x.shape[-1], threshold)
        return torch.where(kept.view(1, -1, x.shape[-1]).to(x.device), x / (1 - self._probability), 0)


def mask(streams: torch.Tensor, tokens: torch.Tensor, columns: int, threshold: int) -> torch.Tensor:
    """`[tokens, columns]`: what is kept.

    Element `(token, column)` is dropped if word `column % 4` of block `token · ⌈columns/4⌉ + ⌊column/4⌋` is below the threshold.
    """
    key0, key1, tag0, tag1 = streams.unbind(dim=-1)
    per_token = -(-columns // 4)
    block = tokens[:, None] * per_token + torch.arange(per_token, device=tokens.device)
    words = _philox([block & _LOW, block >> 32, tag0[:, None], tag1[:, None]], [key0[:, None], key1[:, None]])
    drawn = torch.stack([word.expand_as(block) for word in words], dim=-1).flatten(1)[:, :columns]
    return drawn >= threshold


@functools.cache
def _masks(kind: str) -> Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]:
    """`mask`, as one kernel on a GPU where torch can make one of its many operations."""
    if kind != "cuda" or importlib.util.find_spec("triton") is None:
        return mask
    compiled = torch.compile(mask, dynamic=True)

    def of_compiler(streams: torch.Tensor, tokens: torch.Tensor, columns: int, threshold: int) -> torch.Tensor:
        nonlocal compiled
        try:
            return compiled(streams, tokens, columns, threshold)
        except Exception as error:
            if compiled is mask:
                raise
            print(f"dropout masks are drawn by many small kernels: torch cannot compile one ({error})", file=sys.stderr)
            compiled = mask
            return mask(streams, tokens, columns, threshold)

    return of_compiler


def fnv1a(text: str) -> int:
    """64-bit FNV-1a: names become numbers in the same way on every machine."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value


def _philox(counter: Sequence[_Word], key: Sequence[_Word]) -> list[Any]:
    """128 bits of counter and 64 of key to 128 random bits, in words of 32 that are held in 64: single ones, or tensors of them."""
    a, b, c, d = counter
    key0, key1 = key
    for _ in range(10):
        first_high, first_low = _product(a, 0xD2511F53)
        second_high, second_low = _product(c, 0xCD9E8D57)
        a, b, c, d = second_high ^ b ^ key0, second_low, first_high ^ d ^ key1, first_low
        key0, key1 = (key0 + 0x9E3779B9) & _LOW, (key1 + 0xBB67AE85) & _LOW
    return [a, b, c, d]


def _product(word: _Word, factor: int) -> tuple[Any, Any]:
    """Upper and lower half of a product of 64 bits. torch's whole numbers have a sign, but the same bits."""
    product = word * factor
    return (product >> 32) & _LOW, product & _LOW
