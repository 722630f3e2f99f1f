"""The labelled images of a semi-supervised measure: if the run held images out, they are those that no client had."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedssl.data import ImageData, save_npz
from fedssl.data.partitioning import partition_dataset
from fedssl.evaluation import labelled_share
from fedssl.experiments.measures import _held_out
from fedssl.experiments.runs import ComputeSettings
from fedssl.protocol.runs import RunSpec

LABELS = np.random.default_rng(1).permutation(np.repeat(np.arange(2), 100))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder with a data set whose image i has only pixels of value i, so that images can be identified."""
    images = np.arange(200, dtype=np.uint8).repeat(64).reshape(200, 1, 8, 8)
    save_npz(tmp_path / "set.npz", ImageData(images, LABELS), ImageData(images, LABELS))
    return tmp_path


def spec(max_train: int | None = None, **partition: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "seed": 3,
            "data": {"channels": 1, "image_size": 8},
            "partition": {"dataset": "set.npz", "num_clients": 4, "scheme": "iid", "seed": 3, **partition},
            "evaluation": {"dataset": "set.npz", "max_train": max_train},
        }
    )


def numbers(images: ImageData) -> list[int]:
    return [int(image[0, 0, 0]) for image in images.images]


@pytest.mark.parametrize(("share", "count"), [(0.1, 20), (0.05, 10)])
def test_labelled_images_are_the_usual_ones_and_no_client_has_them(root: Path, share: float, count: int) -> None:
    wanted = spec(hold_out=0.1)

    few = _held_out(wanted, share, ComputeSettings(data_root=root))

    assert few is not None
    assert few.labels is not None
    assert numbers(few) == labelled_share(LABELS, share, seed=3).tolist()
    assert np.bincount(few.labels).tolist() == [count // 2, count // 2]
    shards = partition_dataset(wanted.partition, wanted.data, root).by_client.values()  # type: ignore[arg-type]
    trained = [number for shard in shards for number in numbers(shard)]
    assert len(trained) == 180
    assert not set(trained) & set(numbers(few))


def test_a_limit_of_training_images_limits_the_labelled_ones_in_proportion(root: Path) -> None:
    few = _held_out(spec(hold_out=0.1, max_train=100), 0.1, ComputeSettings(data_root=root))

    assert few is not None
    assert len(few) == 10
    assert set(numbers(few)) <= set(labelled_share(LABELS, 0.1, seed=3))


@pytest.mark.parametrize("changes", [{}, {"hold_out": 0.05}, {"hold_out": 0.1, "dataset": "digits"}])
def test_labelled_images_are_drawn_from_all_images_unless_that_share_was_held_out(
    root: Path, changes: dict[str, Any]
) -> None:
    assert _held_out(spec(**changes), 0.1, ComputeSettings(data_root=root)) is None
