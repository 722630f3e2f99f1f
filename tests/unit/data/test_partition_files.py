"""Partitions from a file: which images each client gets, and a clear refusal of every unusable file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fedssl.data import ImageData, partition_files, save_npz
from fedssl.data.partition_files import read_partition
from fedssl.data.partitioning import assign_images, client_names, partition_dataset, partition_plan
from fedssl.errors import DataError
from fedssl.protocol.data import DataConfig, PartitionConfig

NAMES = ["client-0", "client-1"]
LABELS = np.repeat(np.arange(2), 10)


def write(folder: Path, content: Any) -> Path:
    path = folder / "split.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def from_file(path: Path, **changes: Any) -> PartitionConfig:
    return PartitionConfig.model_validate({"num_clients": 2, "scheme": "file", "file": str(path), **changes})


def test_a_list_gives_the_clients_their_default_names_and_sorted_images(tmp_path: Path) -> None:
    found = read_partition(write(tmp_path, [[7, 0, 3], [9, 1]]), NAMES, 10)

    assert {name: part.tolist() for name, part in found.items()} == {"client-0": [0, 3, 7], "client-1": [1, 9]}
    assert all(part.dtype == np.int64 for part in found.values())


def test_an_object_gives_the_clients_its_own_names_in_order(tmp_path: Path) -> None:
    found = read_partition(write(tmp_path, {"site-b": [4], "site-a": [2, 1]}), NAMES, 10)

    assert [(name, part.tolist()) for name, part in found.items()] == [("site-b", [4]), ("site-a", [1, 2])]


@settings(max_examples=30, deadline=None)
@given(config=st.builds(PartitionConfig, num_clients=st.integers(1, 5), scheme=st.just("iid"), seed=st.integers(0, 99)))
def test_a_computed_partition_written_to_a_file_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, config: PartitionConfig
) -> None:
    computed = assign_images(config, LABELS)
    path = write(tmp_path_factory.mktemp("splits"), [part.tolist() for part in computed.by_client.values()])

    read = assign_images(from_file(path, num_clients=config.num_clients), LABELS)

    assert read.by_client.keys() == computed.by_client.keys()
    assert all(np.array_equal(part, computed.by_client[name]) for name, part in read.by_client.items())
    assert np.array_equal(read.counts, computed.counts)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([[0, 1, 0], [2]], "split.json: client-0 has image 0 twice"),
        ([[0, 1], [2, 1]], "image 1 belongs to both client-0 and client-1"),
        ({"a": [0, 1], "b": [1]}, "image 1 belongs to both a and b"),
        ([[0], [10]], "client-1 has the index 10, but the training split has the images 0 to 9"),
        ([[0], [10**400]], r"client-1 has the index 1000\d*\.\.\.0*, but"),
        ([[0], [-1]], "client-1 has the index -1, but the training split has the images 0 to 9"),
        ([[0], [True]], "client-1 has the index True, which is not a whole number"),
        ([[0], [1.0]], r"client-1 has the index 1\.0, which is not a whole number"),
        ("[[0], [NaN]]", "client-1 has the index nan, which is not a whole number"),
        ([[0], ["1"]], "client-1 has the index '1', which is not a whole number"),
        ([[0], [None]], "client-1 has the index None, which is not a whole number"),
        ([[0], [[1]]], r"client-1 has the index \[1\], which is not a whole number"),
        ([[0], []], "client-1 has no images"),
        ([[0], 1], "client-1 must have a list of indices, and has 1"),
        ({"site-a": [0], "site-b": {}}, r"site-b must have a list of indices, and has \{\}"),
        ([[0], [1], [2]], r"has 3 clients, but partition\.num_clients is 2"),
        ([[0]], r"has 1 client, but partition\.num_clients is 2"),
        ([], r"has 0 clients, but"),
        ({"Site A": [0], "b": [1]}, "'Site A' cannot be a client's name"),
        ('{"a": [0], "a": [1]}', "has the client 'a' twice"),
        ("7", "must hold a list of indices per client"),
        ("null", "must hold a list of indices per client"),
        ("[[0], [1]", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[[0], [" + "1" * 5000 + "]]", "is not valid JSON"),
        ("", "is not valid JSON"),
    ],
)
def test_an_unusable_file_is_refused_and_its_client_named(tmp_path: Path, content: Any, said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        read_partition(write(tmp_path, content), NAMES, 10)
    assert str(tmp_path / "split.json") in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_a_missing_binary_or_too_large_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"cannot read .*No such file"):
        read_partition(tmp_path / "none.json", NAMES, 10)
    with pytest.raises(DataError, match=r"cannot read .*directory"):
        read_partition(tmp_path, NAMES, 10)
    (tmp_path / "split.json").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(DataError, match="is not valid JSON"):
        read_partition(tmp_path / "split.json", NAMES, 10)
    monkeypatch.setattr(partition_files, "MAX_PARTITION_FILE_BYTES", 10)
    read_partition(write(tmp_path, "[[0], [1]]"), NAMES, 10)
    with pytest.raises(DataError, match="is larger than"):
        read_partition(write(tmp_path, "[[0], [1]] "), NAMES, 10)


def test_images_are_divided_as_in_the_file_and_then_reduced_by_the_share(tmp_path: Path) -> None:
    images = ImageData(np.arange(20, dtype=np.uint8).repeat(256).reshape(20, 1, 16, 16), LABELS, ("a", "b"))
    save_npz(tmp_path / "set.npz", images)
    write(tmp_path, [[19, 0, 10, 1], [5]])
    config = from_file(Path("split.json"), dataset="set.npz")  # both are found in the data folder

    held = partition_plan(config, tmp_path)
    shards = partition_dataset(config, DataConfig(channels=1, image_size=16), tmp_path)
    half = partition_plan(config.model_copy(update={"share": 0.5}), tmp_path)

    assert held.counts.tolist() == shards.counts.tolist() == [[2, 2], [1, 0]]
    assert shards.by_client["client-0"].images[:, 0, 0, 0].tolist() == [0, 1, 10, 19]
    assert [len(part) for part in half.by_client.values()] == [2, 1]
    assert set(half.by_client["client-0"]) < {0, 1, 10, 19}


def test_images_without_labels_are_divided_as_in_the_file(tmp_path: Path) -> None:
    save_npz(tmp_path / "set.npz", ImageData(np.zeros((20, 1, 16, 16), np.uint8)))

    held = partition_plan(from_file(write(tmp_path, [[3, 4], [5]]), dataset="set.npz"), tmp_path)

    assert held.counts.tolist() == [[2], [1]]


def test_a_pooled_run_does_not_read_the_file(tmp_path: Path) -> None:
    held = assign_images(from_file(tmp_path / "none.json", pooled=True, max_images=5), LABELS)

    assert list(held.by_client) == client_names(1)
    assert held.counts.sum() == 5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"scheme": "file"}, "needs partition.file, a JSON file"),
        ({"scheme": "iid", "file": "a.json"}, "partition.file is not used by the scheme iid"),
        ({"file": "a.json"}, "partition.file is not used by the scheme dirichlet"),
        ({"scheme": "file", "file": "a.json", "max_images": 5}, "leave out partition.max_images"),
        ({"scheme": "file", "file": "a.json", "hold_out": 0.1}, "leave out partition.hold_out"),
        ({"scheme": "file", "file": ""}, "at least 1 character"),
        ({"scheme": "file", "file": "a" * 1001}, "at most 1000 characters"),
    ],
)
def test_a_file_and_its_scheme_must_be_given_together(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        PartitionConfig.model_validate(given)


def test_specs_without_a_file_have_no_file_key() -> None:
    assert "file" not in PartitionConfig().model_dump(mode="json")
    config = PartitionConfig(scheme="file", file="a.json")
    assert PartitionConfig.model_validate(config.model_dump(mode="json")) == config
