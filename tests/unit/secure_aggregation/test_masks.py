"""Masks: chunks, exact cancellation, and no part of the stream used twice."""

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from fedssl.secure_aggregation.masks import CHUNK_BYTES, Mask, apply_masks

KEY = bytes(range(32))


def _stream(num_bytes: int, key: bytes = KEY) -> bytes:
    return Cipher(AES(key), CTR(bytes(16))).encryptor().update(bytes(num_bytes))


@pytest.mark.parametrize("size", [1, 2, 7, CHUNK_BYTES // 8 + 3])
def test_a_mask_is_the_stream_as_little_endian_words(size: int) -> None:
    words = np.zeros(size, np.uint64)
    apply_masks(words, [Mask(KEY)])
    assert words.astype("<u8").tobytes() == _stream(8 * size)


def test_adding_and_subtracting_a_mask_cancel_modulo_the_word() -> None:
    words = np.array([0, 1, 2**64 - 1], np.uint64)
    masked = words.copy()
    apply_masks(masked, [Mask(KEY)])
    assert not np.array_equal(masked, words)
    apply_masks(masked, [Mask(KEY, is_negative=True)])
    assert np.array_equal(masked, words)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads_and_many_masks_give_the_bits_of_one_mask_after_the_other(num_threads: int) -> None:
    size = 9 * CHUNK_BYTES // 8 + 3  # several parts, and a last one that is not full
    masks = [Mask(number.to_bytes(32), is_negative=number % 3 == 0) for number in range(300)]
    found, expected = np.zeros(size, np.uint64), np.zeros(size, np.uint64)
    apply_masks(found, masks, num_threads=num_threads)
    for mask in masks:
        stream = np.frombuffer(_stream(8 * size, mask.key), "<u8")
        expected += 0 - stream if mask.is_negative else stream
    assert np.array_equal(found, expected)
