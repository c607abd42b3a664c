"""BLAKE3, by which saved states name their files.

The package `blake3` does it where it is installed. Else numpy does, a block of many chunks at a time.

Source: O'Connor et al., "BLAKE3: one function, fast everywhere", section 2.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_native: Any = importlib.import_module("blake3").blake3 if importlib.util.find_spec("blake3") else None

Words = NDArray[np.uint32]

_IV = np.array(
    [0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19], dtype=np.uint32
)
_PERMUTATION = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8]
_COLUMNS_AND_DIAGONALS = [
    *[(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)],
    *[(0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)],
]
_CHUNK_START, _CHUNK_END, _PARENT, _ROOT = 1, 2, 4, 8
_CHUNK, _BLOCK = 1024, 64
# As many chunks at once as keep the sixteen words of state in a processor's cache.
_AT_ONCE = 4096


def digest_of(data: bytes) -> str:
    """The digest as hexadecimal digits."""
    return str(_native(data).hexdigest()) if _native else portable_digest(iter([data]))


def digest_of_file(path: Path) -> str:
    """The digest of a file's content."""
    if _native:
        return str(_native(max_threads=_native.AUTO).update_mmap(path).hexdigest())
    with path.open("rb") as file:
        return portable_digest(iter(lambda: file.read(_AT_ONCE * _CHUNK), b""))


def portable_digest(pieces: Iterator[bytes]) -> str:
    """The digest of pieces that follow each other; all but the last hold whole chunks."""
    values: list[Words] = []
    count = 0
    held = next(pieces, b"")
    for piece in pieces:
        values.append(_chunks(held, count))
        count += len(held) // _CHUNK
        held = piece
    if count == 0 and len(held) <= _CHUNK:
        return _hex(_last_chunk(held, 0, _ROOT))
    # The last chunk, whole or not, stands by itself.
    whole = (len(held) - 1) // _CHUNK
    if whole:
        values.append(_chunks(held[: whole * _CHUNK], count))
    values.append(_last_chunk(held[whole * _CHUNK :], count + whole, 0))
    return _hex(_tree(_beside(values)))


def _hex(value: Words) -> str:
    return value[:, 0].astype("<u4").tobytes().hex()


def _beside(values: list[Words]) -> Words:
    together: Words = np.concatenate(values, axis=1)
    return together


def _chunks(data: bytes, first: int) -> Words:
    """The values of whole chunks, `[8, chunks]`; `first` is the number of the first."""
    found = []
    for start in range(0, len(data), _AT_ONCE * _CHUNK):
        words = np.frombuffer(data[start : start + _AT_ONCE * _CHUNK], dtype="<u4").reshape(-1, 16, 16)
        numbers = np.arange(len(words), dtype=np.uint64) + np.uint64(first + start // _CHUNK)
        value: Words = np.repeat(_IV[:, None], len(words), axis=1)
        for block in range(16):
            flags = (_CHUNK_START if block == 0 else 0) | (_CHUNK_END if block == 15 else 0)
            value = _compress(value, words[:, block].T.astype(np.uint32), numbers, _BLOCK, flags)
        found.append(value)
    return _beside(found)


def _last_chunk(data: bytes, number: int, flags: int) -> Words:
    """The value of a chunk of any length."""
    value: Words = _IV[:, None].copy()
    blocks = max(1, -(-len(data) // _BLOCK))
    for block in range(blocks):
        piece = data[block * _BLOCK : (block + 1) * _BLOCK]
        words = np.frombuffer(piece.ljust(_BLOCK, b"\0"), dtype="<u4")[:, None].astype(np.uint32)
        of_block = _CHUNK_START if block == 0 else 0
        if block == blocks - 1:
            of_block |= _CHUNK_END | flags
        value = _compress(value, words, np.array([number], dtype=np.uint64), len(piece), of_block)
    return value


def _tree(values: Words) -> Words:
    """The root of the tree over the values of chunks.

    Pairs are taken from the left, and one that is left over goes up a level as it is: the same tree as one whose left
    halves are full.
    """
    while values.shape[1] > 1:
        pairs = values.shape[1] // 2
        flags = _PARENT | (_ROOT if values.shape[1] == 2 else 0)
        blocks = np.concatenate([values[:, 0 : 2 * pairs : 2], values[:, 1 : 2 * pairs : 2]])
        key = np.repeat(_IV[:, None], pairs, axis=1)
        parents = _compress(key, blocks, np.zeros(pairs, dtype=np.uint64), _BLOCK, flags)
        values = np.concatenate([parents, values[:, 2 * pairs :]], axis=1)
    return values


def _compress(value: Words, block: Words, counter: NDArray[np.uint64], length: int, flags: int) -> Words:
    """The first half of the compression function's result, for many inputs side by side."""
    lanes = value.shape[1]
    low = (counter & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    high = (counter >> np.uint64(32)).astype(np.uint32)
    rest = [low, high, np.full(lanes, length, np.uint32), np.full(lanes, flags, np.uint32)]
    state = [*value, *(np.full(lanes, word, np.uint32) for word in _IV[:4]), *rest]
    message = list(block)
    for round_ in range(7):
        for index, (a, b, c, d) in enumerate(_COLUMNS_AND_DIAGONALS):
            _mix(state, a, b, c, d, message[2 * index], message[2 * index + 1])
        if round_ < 6:
            message = [message[place] for place in _PERMUTATION]
    half: Words = np.stack([state[index] ^ state[index + 8] for index in range(8)])
    return half


def _mix(state: list[Words], a: int, b: int, c: int, d: int, first: Words, second: Words) -> None:
    for word, (turn_d, turn_b) in ((first, (16, 12)), (second, (8, 7))):
        state[a] = state[a] + state[b] + word
        state[d] = _turn(state[d] ^ state[a], turn_d)
        state[c] = state[c] + state[d]
        state[b] = _turn(state[b] ^ state[c], turn_b)


def _turn(words: Words, by: int) -> Words:
    turned: Words = (words >> np.uint32(by)) | (words << np.uint32(32 - by))
    return turned
