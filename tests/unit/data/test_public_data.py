"""Public images, which all clients have."""

from pathlib import Path

import numpy as np
import pytest

from fedssl.data import ImageData, save_npz
from fedssl.data.partitioning import load_public
from fedssl.errors import DataError, SpecError
from fedssl.protocol.data import DataConfig, PublicDataConfig
from fedssl.simulation import simulate
from support.methods import method_spec, shards

DATA = DataConfig(channels=1, image_size=8)


def test_all_clients_load_the_same_images_and_another_seed_gives_others() -> None:
    config = PublicDataConfig(dataset="digits", split="test", num_images=50)
    one, again = load_public(config, DATA), load_public(config, DATA)
    assert one.images.shape == (50, 1, 8, 8)
    assert one.labels is None
    assert np.array_equal(one.images, again.images)
    other = load_public(config.model_copy(update={"seed": 1}), DATA)
    assert not np.array_equal(one.images, other.images)
    train = load_public(config.model_copy(update={"split": "train"}), DATA)
    assert not np.array_equal(one.images, train.images)


def test_too_few_images_are_refused() -> None:
    with pytest.raises(DataError, match=r"test split of digits has 360 images here.*needs 361"):
        load_public(PublicDataConfig(dataset="digits", split="test", num_images=361), DATA)


def test_public_images_can_come_from_a_file(tmp_path: Path) -> None:
    images = np.arange(12 * 64, dtype=np.uint8).reshape(12, 1, 8, 8)
    save_npz(tmp_path / "public.npz", ImageData(images, np.zeros(12, np.int64)))
    config = PublicDataConfig(dataset="public.npz", num_images=12)
    assert np.array_equal(load_public(config, DATA, tmp_path).images, images)


def test_the_number_of_given_images_must_be_the_declared_one() -> None:
    spec = method_spec("flesd")
    with pytest.raises(SpecError, match="num_images is 128, but 10 images are given"):
        simulate(spec, shards(spec), public=shards(spec)["client-0"].subset(np.arange(10)))
