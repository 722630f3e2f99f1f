"""The command `fedssl partition`: the table, the document and the picture agree with the partition."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedssl.cli.datasets.partition_report import cells, describe
from fedssl.cli.main import app
from fedssl.data import ImageData, load_dataset, save_npz
from fedssl.data.partitioning import partition_dataset
from fedssl.protocol.data import DataConfig, PartitionConfig

SPEC = """
[data]
channels = 1
image_size = 16

[partition]
dataset = "digits"
num_clients = 3
alpha = 0.5
variant = "ssd"
seed = 7
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "run.toml"
    path.write_text(SPEC)
    return str(path)


def test_the_document_describes_what_a_simulation_would_train_on(spec: str, tmp_path: Path) -> None:
    out = tmp_path / "pictures" / "who.png"
    arguments = ["partition", spec, "--set", "partition.share=0.5", "--out", str(out), "--format", "json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    config = PartitionConfig.model_validate(document["partition"])
    shards = partition_dataset(config, DataConfig(channels=1, image_size=16))
    assert config.share == 0.5
    assert [client["counts_by_class"] for client in document["clients"]] == shards.counts.tolist()
    assert [client["num_images"] for client in document["clients"]] == [len(s) for s in shards.by_client.values()]
    assert [client["client"] for client in document["clients"]] == list(shards.by_client)
    assert document["num_images"] == shards.counts.sum()
    assert document["counts_by_class"] == shards.counts.sum(axis=0).tolist()
    assert document["class_names"] == list("0123456789")
    assert document["picture"] == str(out)
    with Image.open(out) as image:
        assert image.format == "PNG"


def test_the_table_lists_clients_and_their_classes(spec: str) -> None:
    result = CliRunner().invoke(app, ["partition", spec])
    assert result.exit_code == 0, result.output
    assert "digits: 1,437 images at 3 clients" in result.stdout
    assert "dirichlet (ssd), alpha 0.5, seed 7" in result.stdout
    counts = partition_dataset(
        PartitionConfig(dataset="digits", num_clients=3, alpha=0.5, variant="ssd", seed=7), DataConfig()
    ).counts
    for number, counts_C in enumerate(counts):
        row = next(line for line in result.stdout.splitlines() if f"client-{number}" in line)
        assert f" {counts_C.sum():,} " in row
        assert f"{counts_C.argmax()} {counts_C.max():,}" in row
    assert re.search(r"all +1,437 +10\.0", result.stdout)


def test_only_the_result_is_written_to_standard_output(spec: str) -> None:
    result = CliRunner().invoke(app, ["partition", spec])
    assert "one class per cell" in result.stderr
    assert "one class per cell" not in result.stdout


def test_a_spec_without_a_partition_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("num_rounds = 1\n")
    result = CliRunner().invoke(app, ["partition", str(tmp_path / "run.toml")])
    assert result.exit_code == 2
    assert "[partition]" in result.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("partition.dataset=nowhere", "nowhere"),
        ("partition.num_clients=2000", "fewer clients"),
        ("partition.share=0", "share"),
    ],
)
def test_an_impossible_partition_is_wrong_usage(spec: str, change: str, words: str) -> None:
    result = CliRunner().invoke(app, ["partition", spec, "--set", change])
    assert result.exit_code == 2
    assert words in result.stderr


def test_unnamed_classes_are_numbered_and_many_share_a_cell(tmp_path: Path, spec: str) -> None:
    data = ImageData(np.zeros((240, 1, 8, 8), np.uint8), np.repeat(np.arange(120), 2))
    save_npz(tmp_path / "many.npz", data)
    changes = [f"partition.dataset={tmp_path / 'many.npz'}", "partition.scheme=classes", "partition.num_clients=2"]
    result = CliRunner().invoke(app, ["partition", spec, *(part for change in changes for part in ("--set", change))])
    assert result.exit_code == 0, result.output
    assert "class 0 2, class 1 2, class 2 2" in result.stdout
    assert "3 classes per cell" in result.stderr
    assert "█" * 20 + "·" * 20 in result.stdout


def test_cells_are_drawn_relative_to_the_largest_count() -> None:
    table = np.array([[0, 1, 8, 4], [0, 0, 0, 0]])
    assert cells(table[0], table) == "·▁█▄"
    assert cells(table[1], table) == "····"
    assert len(cells(np.ones(101, np.int64), np.ones((1, 101), np.int64))) == 34


def test_descriptions_name_the_scheme_and_its_settings() -> None:
    assert describe(PartitionConfig(scheme="classes", alpha=None)) == "whole classes, seed 0"
    assert (
        describe(PartitionConfig(pooled=True, max_images=5000)) == "pooled at one client, seed 0, at most 5,000 images"
    )
    assert describe(PartitionConfig(scheme="iid", share=0.25)) == "iid, seed 0, 25% of each client's images kept"


def test_a_worker_can_load_the_written_shards(spec: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["partition", spec, "--shards", str(tmp_path / "shards")])
    assert result.exit_code == 0, result.output
    dealt = partition_dataset(
        PartitionConfig(dataset="digits", num_clients=3, alpha=0.5, variant="ssd", seed=7),
        DataConfig(channels=1, image_size=16),
    ).by_client
    assert sorted(path.name for path in (tmp_path / "shards").iterdir()) == sorted(dealt)
    for client, images in dealt.items():
        read = load_dataset(str(tmp_path / "shards" / client / "images.npz"), "train")
        assert np.array_equal(read.images, images.images)
        assert read.labels is not None
        assert images.labels is not None
        assert np.array_equal(read.labels, images.labels)


def test_a_partition_files_client_names_are_shown(spec: str, tmp_path: Path) -> None:
    path = tmp_path / "split.json"
    path.write_text('{"site-b": [3, 1, 2], "site-a": [7]}')
    changes = ["partition.scheme=file", f"partition.file={path}", "partition.num_clients=2"]
    arguments = [part for change in changes for part in ("--set", change)]

    shown = CliRunner().invoke(app, ["partition", spec, *arguments, "--format", "json"])
    table = CliRunner().invoke(app, ["partition", spec, *arguments])

    assert [(one["client"], one["num_images"]) for one in json.loads(shown.stdout)["clients"]] == [
        ("site-b", 3),
        ("site-a", 1),
    ]
    assert f"as in {path}\n" in table.stdout
