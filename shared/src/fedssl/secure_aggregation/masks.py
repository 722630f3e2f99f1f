"""Masks: the AES-256-CTR key stream as words, added to vectors of 64-bit and 32-bit words.

A vector has two blocks, words of 64 and of 32 bits. One key's stream covers both: the 32-bit words begin at the first
whole AES block after the 64-bit words, so that no part of the stream is used twice.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

AES_BLOCK = 16
CHUNK_BYTES = 256 << 10  # fits into a core's cache together with the words that it is added to

_ZEROS = bytes(CHUNK_BYTES)


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
        """Return a vector of its own memory."""
        return Words(self.words64.copy(), self.words32.copy())

    def is_equal(self, other: "Words") -> bool:
        """Return whether both have the same words."""
        return np.array_equal(self.words64, other.words64) and np.array_equal(self.words32, other.words32)

    def add(self, other: "Words") -> None:
        """Add another vector of the same sizes in place, modulo 2^64 and 2^32."""
        np.add(self.words64, other.words64, out=self.words64)
        np.add(self.words32, other.words32, out=self.words32)


def apply_mask(vector: Words, key: bytes, *, is_negative: bool = False) -> None:
    """Add a key's mask to a vector in place, or subtract it.

    Words are little-endian. The key must be used for one vector only: two vectors under one mask give their difference.

    Reference: Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine learning", PRG of
    section 3.3, here AES-256 in counter mode (NIST SP 800-38A).
    """
    _apply(vector.words64, "<u8", key, 0, is_negative=is_negative)
    behind = -(-8 * vector.words64.size // AES_BLOCK) * AES_BLOCK
    _apply(vector.words32, "<u4", key, behind, is_negative=is_negative)


def _apply(words: NDArray[Any], dtype: str, key: bytes, first_byte: int, *, is_negative: bool) -> None:
    combine = np.subtract if is_negative else np.add
    encryptor = Cipher(AES(key), CTR((first_byte // AES_BLOCK).to_bytes(AES_BLOCK))).encryptor()
    step = CHUNK_BYTES // words.itemsize
    for start in range(0, words.size, step):
        piece = words[start : start + step]
        mask = np.frombuffer(encryptor.update(_ZEROS[: piece.nbytes]), dtype)
        combine(piece, mask, out=piece)
