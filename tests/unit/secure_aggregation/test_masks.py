"""Masks: both word sizes, chunks, exact cancellation, and no part of the stream is used twice."""

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from fedssl.secure_aggregation.masks import CHUNK_BYTES, Mask, Words, apply_masks

KEY = bytes(range(32))


def _stream(num_bytes: int, key: bytes = KEY) -> bytes:
    return Cipher(AES(key), CTR(bytes(16))).encryptor().update(bytes(num_bytes))


@pytest.mark.parametrize(
    "sizes", [(0, 5), (1, 0), (1, 3), (2, 3), (7, 9), (CHUNK_BYTES // 8 + 3, CHUNK_BYTES // 4 + 5)]
)
def test_the_stream_covers_64_bit_words_and_then_32_bit_words(sizes: tuple[int, int]) -> None:
    words = Words.zeros(*sizes)
    apply_masks(words, [Mask(KEY)])
    second = -(-8 * sizes[0] // 16) * 16
    stream = _stream(second + 4 * sizes[1])
    assert words.words64.astype("<u8").tobytes() == stream[: 8 * sizes[0]]
    assert words.words32.astype("<u4").tobytes() == stream[second:]


def test_adding_and_subtracting_a_mask_cancel_modulo_the_word() -> None:
    words = Words(np.array([0, 1, 2**64 - 1], np.uint64), np.array([0, 2**32 - 1], np.uint32))
    masked = words.copy()
    apply_masks(masked, [Mask(KEY)])
    assert not masked.is_equal(words)
    apply_masks(masked, [Mask(KEY, is_negative=True)])
    assert masked.is_equal(words)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads_and_many_masks_give_the_bits_of_applying_one_mask_after_another(num_threads: int) -> None:
    sizes = (5 * CHUNK_BYTES // 8 + 3, 4 * CHUNK_BYTES // 4 + 5)  # several parts, the last of them incomplete
    masks = [Mask(number.to_bytes(32), is_negative=number % 3 == 0) for number in range(300)]
    found = Words.zeros(*sizes)
    apply_masks(found, masks, num_threads=num_threads)
    expected, second = Words.zeros(*sizes), 8 * (sizes[0] + 1)
    for mask in masks:
        stream = _stream(second + 4 * sizes[1], mask.key)
        wide, narrow = np.frombuffer(stream[: 8 * sizes[0]], "<u8"), np.frombuffer(stream[second:], "<u4")
        expected.add(Words(0 - wide, 0 - narrow) if mask.is_negative else Words(wide.copy(), narrow.copy()))
    assert found.is_equal(expected)


def test_sums_wrap_modulo_the_word_size() -> None:
    total = Words(np.array([2**64 - 1], np.uint64), np.array([2**32 - 2], np.uint32))
    total.add(Words(np.array([3], np.uint64), np.array([3], np.uint32)))
    assert (total.words64.tolist(), total.words32.tolist()) == ([2], [1])


def test_other_dtypes_and_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="words64 must be one-dimensional uint64, not int64"):
        Words(np.zeros(2, np.int64), np.zeros(2, np.uint32))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="words32 must be one-dimensional uint32"):
        Words(np.zeros(2, np.uint64), np.zeros((1, 2), np.uint32))
