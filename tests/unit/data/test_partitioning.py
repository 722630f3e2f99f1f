"""The images of the clients: none lost, none twice, the same every time, and reduced only after the partition."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedssl.data import PARTITIONS, ImageData, save_npz
from fedssl.data.partitioning import assign_images, client_names, held_out_images, partition_dataset, partition_plan
from fedssl.errors import DataError
from fedssl.protocol.data import DataConfig, PartitionConfig

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 300))
DIGITS = PartitionConfig(dataset="digits", num_clients=5, scheme="dirichlet", alpha=0.5, seed=3)
SHAPE = DataConfig(channels=1, image_size=16)

configs = st.builds(
    PartitionConfig,
    num_clients=st.integers(1, 12),
    scheme=st.sampled_from(["iid", "classes", "dirichlet"]),
    variant=st.sampled_from(["fedx", "ssd", "flesd", "orchestra"]),
    alpha=st.sampled_from([0.5, 1.0, 100.0]),
    share=st.sampled_from([0.1, 0.25, 0.5, 1.0]),
    max_images=st.sampled_from([None, 1500, 3000, 9999]),
    hold_out=st.sampled_from([0.0, 0.01, 0.1]),
    pooled=st.booleans(),
    seed=st.integers(0, 2**63 - 1),
)


def test_names_are_padded_only_as_far_as_the_last_one_needs() -> None:
    assert client_names(10) == [f"client-{number}" for number in range(10)]
    assert client_names(11)[::10] == ["client-00", "client-10"]


@settings(max_examples=60, deadline=None)
@given(config=configs)
def test_no_image_is_assigned_twice_and_none_is_lost(config: PartitionConfig) -> None:
    held = assign_images(config, LABELS)
    parts = list(held.by_client.values())
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)
    assert all(bool((np.diff(part) > 0).all()) for part in parts)
    assert len(parts) == (1 if config.pooled else config.num_clients)
    assert held.counts.sum(axis=1).tolist() == [len(part) for part in parts]
    pool = len(LABELS) - round(config.hold_out * 300) * 10
    expected = min(config.max_images or pool, pool)
    if config.scheme != "dirichlet" or config.variant != "flesd":
        assert abs(len(together) - config.share * expected) <= config.num_clients
    again = assign_images(config, LABELS)
    assert all(np.array_equal(again.by_client[name], part) for name, part in held.by_client.items())


@settings(max_examples=30, deadline=None)
@given(config=configs)
def test_a_share_is_a_part_of_the_clients_whole_partition(config: PartitionConfig) -> None:
    """The rows of Table 3a are taken from one partition, each as a part of the next larger."""
    sizes = []
    previous: dict[str, np.ndarray] = {}
    for share in (0.1, 0.25, 0.5, 1.0):
        held = assign_images(config.model_copy(update={"share": share}), LABELS).by_client
        for name, part in previous.items():
            assert np.isin(part, held[name]).all()
        previous = held
        sizes.append([len(part) for part in held.values()])
    for row, share in zip(sizes, (0.1, 0.25, 0.5, 1.0), strict=True):
        assert row == [min(whole, max(1, int(share * whole + 0.5))) for whole in sizes[-1]]


def test_max_images_is_applied_before_the_partition_and_share_after_it() -> None:
    config = PartitionConfig(num_clients=5, scheme="classes", alpha=None, max_images=1000)
    before = assign_images(config, LABELS).counts
    after = assign_images(config.model_copy(update={"max_images": None, "share": 1000 / 3000}), LABELS).counts
    assert before.sum() == after.sum() == 1000
    assert after.sum(axis=1).tolist() == [200] * 5
    assert before.sum(axis=1).tolist() != [200] * 5, "a random 1,000 images are not equally many of each class"


def test_the_default_partition_equals_the_golden_one() -> None:
    """The results of runs depend on these numbers. They may change only with a changelog entry."""
    held = assign_images(PartitionConfig(num_clients=3, alpha=1.0, seed=17), np.repeat(np.arange(3), 20))
    assert held.counts.tolist() == [[1, 3, 8], [4, 12, 12], [15, 5, 0]]
    assert held.by_client["client-0"][:5].tolist() == [18, 29, 30, 38, 42]


def test_a_partition_with_a_share_equals_the_golden_one() -> None:
    held = assign_images(PartitionConfig(num_clients=3, alpha=1.0, seed=17, share=0.25), np.repeat(np.arange(3), 20))
    assert [part.tolist() for part in held.by_client.values()] == [
        [43, 46, 49],
        [32, 35, 39, 41, 45, 52, 57],
        [2, 7, 12, 15, 36],
    ]


def test_the_partitioned_data_set_has_the_planned_images() -> None:
    config = DIGITS.model_copy(update={"share": 0.5, "max_images": 1000, "variant": "orchestra"})
    shards, held = partition_dataset(config, SHAPE), partition_plan(config)
    assert np.array_equal(shards.counts, held.counts)
    whole = partition_dataset(PartitionConfig(dataset="digits", pooled=True), SHAPE).by_client["client-0"]
    assert whole.labels is not None
    for name, part in held.by_client.items():
        shard = shards.by_client[name]
        assert shard.labels is not None
        assert np.array_equal(shard.images, whole.images[part])
        assert np.array_equal(shard.labels, whole.labels[part])
        assert shard.images.flags.writeable, "torch shares memory with it"


@settings(max_examples=30, deadline=None)
@given(config=configs, share=st.sampled_from([0.01, 0.1, 0.4]))
def test_no_client_has_a_held_out_image(config: PartitionConfig, share: float) -> None:
    config = config.model_copy(update={"hold_out": share})
    held_out = held_out_images(config, LABELS)
    assert np.bincount(LABELS[held_out]).tolist() == [round(share * 300)] * 10
    assert np.isin(held_out_images(config, LABELS, share / 2), held_out).all()
    for part in assign_images(config, LABELS).by_client.values():
        assert not np.isin(part, held_out).any()


def test_a_spec_without_a_hold_out_has_no_such_key() -> None:
    config = PartitionConfig(num_clients=3, alpha=1.0, seed=17)
    assert "hold_out" not in config.model_dump(mode="json")
    held = assign_images(PartitionConfig(num_clients=1, scheme="iid", hold_out=0.5, seed=3), np.repeat([0, 1], 4))
    assert held.by_client["client-0"].tolist() == [0, 1, 4, 6]


def test_a_hold_out_needs_labels_and_must_leave_images(tmp_path: Path) -> None:
    save_npz(tmp_path / "set.npz", ImageData(np.zeros((40, 1, 16, 16), np.uint8)))
    config = PartitionConfig(dataset="set.npz", scheme="iid", hold_out=0.1)
    for look in (lambda: partition_plan(config, tmp_path), lambda: partition_dataset(config, SHAPE, tmp_path)):
        with pytest.raises(DataError, match=r"no labels, which partition\.hold_out needs"):
            look()
    with pytest.raises(DataError, match=r"partition\.hold_out = 0\.1 leaves no image"):
        assign_images(config, np.arange(5))


def test_a_class_without_images_is_still_counted(tmp_path: Path) -> None:
    data = ImageData(np.zeros((40, 1, 16, 16), np.uint8), np.repeat(np.arange(2), 20), ("a", "b", "never"))
    save_npz(tmp_path / "set.npz", data)
    held = partition_plan(PartitionConfig(dataset="set.npz", num_clients=2, scheme="iid", alpha=None), tmp_path)
    assert held.counts.shape == (2, 3)
    assert held.class_names == ("a", "b", "never")


@pytest.mark.parametrize("changes", [{"scheme": "iid"}, {"pooled": True}])
def test_unlabelled_images_are_partitioned_if_the_scheme_needs_no_labels(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    for number in range(40):
        Image.new("L", (16, 16), number).save(tmp_path / f"{number:02}.png")
    config = PartitionConfig.model_validate({"dataset": str(tmp_path), "num_clients": 4, "seed": 5, **changes})
    held, shards = partition_plan(config), partition_dataset(config, SHAPE)
    assert held.class_names == ("without label",)
    assert np.array_equal(held.counts, shards.counts)
    assert held.counts.sum() == 40
    for client, part in held.by_client.items():
        assert shards.by_client[client].labels is None
        assert shards.by_client[client].images[:, 0, 0, 0].tolist() == part.tolist()


def test_a_scheme_that_needs_labels_is_refused_before_anything_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("L", (16, 16)).save(tmp_path / "1.png")
    monkeypatch.setattr("fedssl.data.folders.decode_to_memory", lambda *_: pytest.fail("decoded"))
    config = PartitionConfig(dataset=str(tmp_path))
    for look in (lambda: partition_plan(config), lambda: partition_dataset(config, SHAPE)):
        with pytest.raises(DataError, match=r'no labels, which the partition scheme dirichlet needs: .*"iid"'):
            look()


def test_unlabelled_images_are_refused_by_a_scheme_that_needs_labels(tmp_path: Path) -> None:
    save_npz(tmp_path / "set.npz", ImageData(np.zeros((40, 1, 16, 16), np.uint8)))
    config = PartitionConfig(dataset="set.npz")
    for look in (lambda: partition_plan(config, tmp_path), lambda: partition_dataset(config, SHAPE, tmp_path)):
        with pytest.raises(DataError, match="no labels"):
            look()


@pytest.mark.parametrize("name", PARTITIONS)
def test_presets_give_valid_partitions(name: str) -> None:
    """Uses labels in the proportions of CIFAR-10."""
    config = PARTITIONS[name]
    held = assign_images(config, np.repeat(np.arange(10), 5000))
    sizes = held.counts.sum(axis=1)
    assert len(sizes) == config.num_clients
    if name == "fedu-classes":
        assert (np.count_nonzero(held.counts, axis=1) == 2).all()
    if name in ("fedu-iid", "orchestra"):
        assert sizes.max() - sizes.min() <= 1
    if config.variant == "fedx" and config.scheme == "dirichlet":
        assert sizes.min() >= 10
