"""Masks: the AES-256-CTR key stream as words, added to vectors of 64-bit and 32-bit words.

A vector has two blocks, words of 64 and of 32 bits. One key's stream covers both: the 32-bit words begin at the first
whole AES block after the 64-bit words, so that no part of the stream is used twice.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

from fedssl.cores import num_usable_cores

AES_BLOCK = 16
CHUNK_BYTES = 128 << 10  # bytes of words, zeros and stream each: the three fit into a core's cache

_ZEROS = memoryview(bytes(CHUNK_BYTES))
_OPEN_STREAMS = 256
_PARTS_PER_THREAD = 4  # so that a core that is busy with other work does not delay the others by much


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """A vector modulo 2^64 and 2^32: `words64` (uint64) and `words32` (uint32), both of one dimension."""

    words64: NDArray[np.uint64]
    words32: NDArray[np.uint32]

    def __post_init__(self) -> None:
        for name, array, dtype in (("words64", self.words64, np.uint64), ("words32", self.words32, np.uint32)):
            if array.dtype != dtype or array.ndim != 1:
                raise ValueError(f"{name} must be one-dimensional {np.dtype(dtype)}, not {array.dtype}{array.shape}")

    @classmethod
    def zeros(cls, num_words64: int, num_words32: int) -> Self:
        """Return a vector of zeros."""
        return cls(np.zeros(num_words64, np.uint64), np.zeros(num_words32, np.uint32))

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of 64-bit words and of 32-bit words."""
        return self.words64.size, self.words32.size

    def copy(self) -> "Words":
        """Return a copy with its own memory."""
        return Words(self.words64.copy(), self.words32.copy())

    def is_equal(self, other: "Words") -> bool:
        """Return whether both have the same words."""
        return np.array_equal(self.words64, other.words64) and np.array_equal(self.words32, other.words32)

    def add(self, other: "Words") -> None:
        """Add another vector of the same sizes in place, modulo 2^64 and 2^32."""
        np.add(self.words64, other.words64, out=self.words64)
        np.add(self.words32, other.words32, out=self.words32)


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask of one key, to be added to a vector, or subtracted from it."""

    key: bytes
    is_negative: bool = False


def apply_masks(vector: Words, masks: Sequence[Mask], *, num_threads: int | None = None) -> None:
    """Add masks to a vector in place, or subtract them.

    Words are little-endian. A key must be used for one vector only: two vectors under one mask give their difference.
    A stream can be read from any of its blocks, so threads share the vector: by default one per usable core. Each takes
    all masks of a piece of the vector while that piece is in its core's cache.

    Reference: Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine learning", PRG of
    section 3.3, here AES-256 in counter mode (NIST SP 800-38A).
    """
    num_threads = num_usable_cores() if num_threads is None else num_threads
    behind = -(-8 * vector.words64.size // AES_BLOCK) * AES_BLOCK
    parts = [*_parts(vector.words64, 0, num_threads), *_parts(vector.words32, behind, num_threads)]
    with ThreadPoolExecutor(num_threads) as pool:
        for working in [pool.submit(_apply, words, first_byte, masks) for words, first_byte in parts]:
            working.result()


def _parts(words: NDArray[Any], first_byte: int, num_threads: int) -> Iterator[tuple[NDArray[Any], int]]:
    """Yield each part of a block with its first byte in the stream: several per thread, and each of whole chunks."""
    num_chunks = -(-words.nbytes // CHUNK_BYTES)
    step = max(1, -(-num_chunks // (num_threads * _PARTS_PER_THREAD))) * CHUNK_BYTES // words.itemsize
    for start in range(0, words.size, step):
        yield words[start : start + step], first_byte + start * words.itemsize


def _apply(words: NDArray[Any], first_byte: int, masks: Sequence[Mask]) -> None:
    stream = bytearray(CHUNK_BYTES + AES_BLOCK)  # update_into needs space for one more block
    step = CHUNK_BYTES // words.itemsize
    mask = np.frombuffer(stream, words.dtype.newbyteorder("<"), step)
    counter = CTR((first_byte // AES_BLOCK).to_bytes(AES_BLOCK))
    for first in range(0, len(masks), _OPEN_STREAMS):
        streams = [
            (Cipher(AES(each.key), counter).encryptor(), np.subtract if each.is_negative else np.add)
            for each in masks[first : first + _OPEN_STREAMS]
        ]
        for start in range(0, words.size, step):
            piece = words[start : start + step]
            for encryptor, combine in streams:
                encryptor.update_into(_ZEROS[: piece.nbytes], stream)
                combine(piece, mask[: piece.size], out=piece)
