"""Masks: the AES-256-CTR key stream as words of 64 bits, added to vectors of such words."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

from fedssl.cores import num_usable_cores

Words = NDArray[np.uint64]
"""A vector modulo 2^64, of one dimension."""

AES_BLOCK = 16
WORD_BYTES = 8
CHUNK_BYTES = 128 << 10  # bytes of words, zeros and stream each: the three fit into a core's cache

_ZEROS = memoryview(bytes(CHUNK_BYTES))
_OPEN_STREAMS = 256
_PARTS_PER_THREAD = 4  # so that a core that is busy with other work does not delay the others by much


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask of one key, to be added to a vector, or subtracted from it."""

    key: bytes
    is_negative: bool = False


def apply_masks(words: Words, masks: Sequence[Mask], *, num_threads: int | None = None) -> None:
    """Add masks to a vector in place, or subtract them.

    Words are little-endian. A key must be used for one vector only: two vectors under one mask give their difference.
    A stream can be read from any of its blocks, so threads share the vector: by default one per usable core. Each takes
    all masks of a piece of the vector while that piece is in its core's cache.

    Reference: Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine learning", PRG of
    section 3.3, here AES-256 in counter mode (NIST SP 800-38A).
    """
    num_threads = num_usable_cores() if num_threads is None else num_threads
    with ThreadPoolExecutor(num_threads) as pool:
        for working in [pool.submit(_apply, *part, masks) for part in _parts(words, num_threads)]:
            working.result()


def _parts(words: Words, num_threads: int) -> Iterator[tuple[Words, int]]:
    """Yield each part of a vector with its first byte in the stream: several per thread, and each of whole chunks."""
    num_chunks = -(-words.nbytes // CHUNK_BYTES)
    step = max(1, -(-num_chunks // (num_threads * _PARTS_PER_THREAD))) * CHUNK_BYTES // WORD_BYTES
    for start in range(0, words.size, step):
        yield words[start : start + step], start * WORD_BYTES


def _apply(words: Words, first_byte: int, masks: Sequence[Mask]) -> None:
    stream = bytearray(CHUNK_BYTES + AES_BLOCK)  # update_into needs space for one more block
    step = CHUNK_BYTES // WORD_BYTES
    mask = np.frombuffer(stream, "<u8", step)
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
