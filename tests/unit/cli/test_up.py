"""How `fedssl up` partitions and stores images, and what it refuses. tests/integration/cli tests its processes."""

import json
import os
import shlex
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format
from fedssl.cli.up import _introduce, dealing_of, dealing_of_sources, encoders_of, sources_of
from fedssl.data import load_dataset
from fedssl.errors import DataError, SpecError
from fedssl.protocol.data import DataConfig, PartitionConfig
from fedssl_local import LocalError, PortTakenError
from fedssl_local.federation import (
    DEFAULT_PORT,
    Dealing,
    Federation,
    _choose_port,
    _own_shape,
    _own_variables,
    require_installed,
)
from fedssl_local.folder import Folder, Record
from fedssl_local.supervisor import Supervisor
from support.answers import answering
from support.federation import tiny_spec

DIGITS = PartitionConfig(dataset="digits", num_clients=3, scheme="iid", alpha=None, seed=4)
GREY = DataConfig(channels=1, image_size=16)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    (tmp_path / "federation").mkdir()
    return Folder(tmp_path / "federation")


def test_partitioning_gives_each_client_its_own_file(folder: Folder) -> None:
    record = folder.partition_dataset(DIGITS, GREY, None)

    assert record.clients == ["client-0", "client-1", "client-2"]
    assert sum(record.num_images.values()) == len(load_dataset("digits", "train")) == 1437
    for client in record.clients:
        shard = load_dataset(str(folder.shard(client)), "train")
        assert len(shard) == record.num_images[client]
        assert stat.S_IMODE(folder.shard(client).stat().st_mode) == 0o600
    assert folder.read() == record


def test_an_interrupted_partition_is_repeated(folder: Folder) -> None:
    (folder.shards / "client-9.npz").parent.mkdir()
    folder.shard("client-9").write_bytes(b"half of it")

    folder.partition_dataset(DIGITS, GREY, None)

    assert sorted(path.stem for path in folder.shards.iterdir()) == ["client-0", "client-1", "client-2"]


def test_a_client_without_images_is_refused_before_anything_is_written(folder: Folder) -> None:
    partition = PartitionConfig(dataset="digits", num_clients=10, variant="ssd", alpha=0.01)

    with pytest.raises(DataError, match=r"client-\d has no images to train on: try another partition\.seed"):
        folder.partition_dataset(partition, GREY, None)

    assert list(folder.root.iterdir()) == []


def test_the_path_of_a_data_set_may_contain_any_characters(folder: Folder, tmp_path: Path) -> None:
    pictures = tmp_path / "Müller" / "写真"
    partition = PartitionConfig(dataset=str(pictures), num_clients=2, scheme="iid", alpha=None)
    for name in ("a", "b"):
        (pictures / name).mkdir(parents=True)
        for number in range(4):
            Image.new("L", (16, 16), 50 * number).save(pictures / name / f"{number}.png")

    assert folder.partition_dataset(partition, GREY, None) == folder.read()


@pytest.mark.parametrize(("own", "dealt"), [((530, 520), 512), ((40, 7), 8), ((40, 30), 30)])
def test_photographs_are_partitioned_in_a_size_that_runs_can_use(
    tmp_path: Path, own: tuple[int, int], dealt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedssl.data.folders.decode_to_memory", lambda *_: pytest.fail("decoded for its shape alone"))
    Image.new("RGB", own).save(tmp_path / "photo.jpg")
    steps: list[str] = []

    shape = _own_shape(Dealing(partition=PartitionConfig(dataset=str(tmp_path)), required={}), steps.append)

    assert (shape.channels, shape.image_size) == (3, dealt)
    assert [str(dealt) in step for step in steps] == [True] * (dealt != min(own))


def test_arrays_keep_their_own_shape() -> None:
    shape = _own_shape(Dealing(partition=PartitionConfig(dataset="digits"), required={}), lambda _: None)

    assert (shape.channels, shape.image_size) == (1, 16)


def test_the_same_partition_is_accepted_again(folder: Folder) -> None:
    record = folder.partition_dataset(DIGITS, GREY, None)

    folder.require_same(record, DIGITS.model_dump())
    folder.require_same(record, {"channels": 1, "image_size": 16})
    folder.require_same(record, {})


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"seed": 5}, "seed is 4, not 5"),
        ({"dataset": "fashion-mnist", "num_clients": 4}, "dataset is digits, not fashion-mnist; num_clients is 3, not"),
        ({"image_size": 28}, "image_size is 16, not 28"),
        ({"alpha": 0.1}, "alpha is None, not 0.1"),
        ({"scheme": "file", "file": "a.json"}, "scheme is iid, not file; file is None, not a.json"),
    ],
)
def test_a_different_partition_is_refused_and_names_the_difference(
    folder: Folder, wanted: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        folder.require_same(folder.partition_dataset(DIGITS, GREY, None), wanted)
    assert "--directory" in str(caught.value)


def test_a_folder_with_other_files_is_refused(folder: Folder, tmp_path: Path) -> None:
    folder.require_usable()
    Folder(tmp_path / "not-there-yet").require_usable()
    (folder.root / "thesis.tex").touch()
    with pytest.raises(LocalError, match="holds other things"):
        folder.require_usable()
    with pytest.raises(LocalError, match="is a file"):
        Folder(folder.root / "thesis.tex").require_usable()
    (folder.root / "supervisor.lock").touch()
    folder.require_usable()


def test_an_unreadable_record_does_not_cause_a_new_partition(folder: Folder) -> None:
    folder.record_path.write_text('{"format": 2}')

    with pytest.raises(LocalError, match="another version"):
        folder.read()


def test_the_url_is_read_from_the_record(folder: Folder) -> None:
    assert folder.url() is None
    folder.write(folder.partition_dataset(DIGITS, GREY, None).model_copy(update={"port": 8123}))

    assert folder.url() == "http://127.0.0.1:8123"
    assert json.loads(folder.record_path.read_text())["port"] == 8123
    assert stat.S_IMODE(folder.record_path.stat().st_mode) == 0o600


def test_only_given_options_are_required_of_an_existing_folder() -> None:
    dealing = dealing_of(None, {"dataset": "digits", "alpha": 0.5})

    assert dealing.partition == PartitionConfig(dataset="digits", alpha=0.5)
    assert dealing.data is None
    assert dealing.required == {"dataset": "digits", "alpha": 0.5}


def test_a_spec_requires_its_whole_partition_and_the_shape_of_its_images() -> None:
    spec = tiny_spec(partition={"dataset": "digits", "seed": 3})

    dealing = dealing_of(spec, {"num_clients": 2})

    assert dealing.partition == PartitionConfig(dataset="digits", seed=3, num_clients=2)
    assert dealing.required == dealing.partition.model_dump() | {"channels": 1, "image_size": 8, "window": None}


def test_a_partition_file_is_accepted_like_other_options(folder: Folder, tmp_path: Path) -> None:
    path = tmp_path / "split.json"
    path.write_text('{"site-a": [0, 2], "site-b": [5]}')

    dealing = dealing_of(None, {"dataset": "digits", "num_clients": 2, "scheme": "file", "file": str(path)})
    record = folder.partition_dataset(dealing.partition, GREY, None)

    assert record.num_images == {"site-a": 2, "site-b": 1}
    folder.require_same(record, dealing.required)
    with pytest.raises(UsageError, match=r"^--partition-file: .* needs partition\.file"):
        dealing_of(None, {"scheme": "file"})


def test_an_impossible_option_is_named() -> None:
    with pytest.raises(UsageError, match="--alpha: "):
        dealing_of(None, {"alpha": -1.0})


def test_ports_are_kept_if_they_are_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortTakenError, match=f"port {port}"):
            _choose_port(port, None)
        assert _choose_port(0, port) not in (0, port)
        assert _choose_port(None, port) != port
    assert _choose_port(0, port) == port
    assert _choose_port(None, port) == port
    assert _choose_port(0, None) != DEFAULT_PORT
    assert _choose_port(port, 1) == port


def test_a_users_environment_variables_do_not_reach_the_federation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSSL_TOKEN", "of another federation")
    monkeypatch.setenv("FEDSSL_DATA", "/data")
    with _own_variables():
        assert "FEDSSL_TOKEN" not in os.environ
        assert os.environ["FEDSSL_DATA"] == "/data"
    assert os.environ["FEDSSL_TOKEN"] == "of another federation"


def test_a_missing_package_of_the_federation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    require_installed()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "fedssl_worker" else object())

    with pytest.raises(LocalError, match=r"needs fedssl_worker: install with pip install fedssl-worker"):
        require_installed()


def folder_of(root: Path, name: str, classes: dict[str, int], size: int = 16, mode: str = "L") -> Path:
    for label, count in classes.items():
        (root / name / label).mkdir(parents=True)
        for number in range(count):
            Image.new(mode, (size, size), 40 * number).save(root / name / label / f"{number}.png")
    return root / name


def test_repeated_data_options_name_the_images_of_each_client(tmp_path: Path) -> None:
    a, b = tmp_path / "Site_A", tmp_path / "b.npz"

    assert sources_of([str(a), str(b)]) == {"site-a": str(a), "b": str(b)}
    assert sources_of([f"first={a}"]) == {"first": str(a)}
    assert sources_of([f"first={a}", f"second={a}"]) == {"first": str(a), "second": str(a)}
    assert sources_of(["digits"]) == sources_of([str(a)]) == sources_of([]) == {}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["x/scans", "y/scans"], "x/scans and --data .*y/scans would both be the images of scans: give them names"),
        (["A=x", "b=y"], "'A' cannot be a client's name"),
        (["a=", "b=y"], "it names no images"),
        (["a=x", "a=y"], "would both be the images of a"),
    ],
)
def test_clients_that_cannot_be_distinguished_are_refused(given: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        sources_of(given)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_clients": 3}, "--clients is for dividing one data set, but --data names the images of 2 clients"),
        ({"alpha": 0.1, "scheme": "iid"}, "--alpha, --scheme are for dividing"),
    ],
)
def test_options_for_dividing_are_refused_if_clients_have_their_own_images(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        dealing_of_sources(None, {"a": "x", "b": "y"}, options)


def test_own_images_and_a_specs_partition_are_refused_together() -> None:
    with pytest.raises(UsageError, match=r"the spec's \[partition\]"):
        dealing_of_sources(tiny_spec(partition={"dataset": "digits"}), {"a": "x", "b": "y"}, {})

    dealing = dealing_of_sources(tiny_spec(partition=None), {"a": "x", "b": "y"}, {})
    assert dealing.required == {"sources": {"a": "x", "b": "y"}, "channels": 1, "image_size": 8, "window": None}


def test_own_images_are_converted_to_one_shape_and_one_numbering_of_classes(folder: Folder, tmp_path: Path) -> None:
    sources = {
        "a": str(folder_of(tmp_path, "a", {"cat": 2, "dog": 1})),
        "b": str(folder_of(tmp_path, "b", {"dog": 2, "newt": 1}, size=20, mode="RGB")),
    }
    steps: list[str] = []

    shape = _own_shape(Dealing(sources=sources, required={}), steps.append)
    record = folder.copy_sources(sources, shape, None)

    assert (shape.channels, shape.image_size) == (3, 16)
    assert "all are converted to 3 channels of 16 pixels" in steps[0]
    assert record == folder.read()
    assert (record.num_images, record.partition, record.sources) == ({"a": 3, "b": 3}, None, sources)
    a, b = (load_dataset(str(folder.shard(name)), "train") for name in "ab")
    assert a.class_names == b.class_names == ("cat", "dog", "newt")
    assert a.labels is not None
    assert b.labels is not None
    assert (a.labels.tolist(), b.labels.tolist()) == ([0, 0, 1], [1, 1, 2])
    assert a.images.shape == b.images.shape == (3, 3, 16, 16)


def test_labels_without_a_common_meaning_are_left_out(folder: Folder, tmp_path: Path) -> None:
    Image.new("L", (16, 16)).save(tmp_path / "loose.png")
    sources = {"a": str(folder_of(tmp_path / "x", "a", {"cat": 2})), "b": str(tmp_path / "loose")}
    (tmp_path / "loose").mkdir()
    (tmp_path / "loose.png").rename(tmp_path / "loose" / "1.png")

    folder.copy_sources(sources, GREY, None)

    assert load_dataset(str(folder.shard("a")), "train").labels is None


def test_a_folder_of_own_images_is_reused_and_a_different_division_is_refused(folder: Folder, tmp_path: Path) -> None:
    sources = {name: str(folder_of(tmp_path, name, {"cat": 2})) for name in "ab"}
    record = folder.copy_sources(sources, GREY, None)

    folder.require_same(record, {})
    folder.require_same(record, {"sources": sources})
    with pytest.raises(SpecError, match="are not partitioned: leave out dataset"):
        folder.require_same(record, {"dataset": "digits"})
    with pytest.raises(SpecError, match="sources is"):
        folder.require_same(record, {"sources": {"a": sources["a"]}})


def test_the_record_of_a_partition_has_no_sources(folder: Folder) -> None:
    folder.partition_dataset(DIGITS, GREY, None)

    assert "sources" not in json.loads(folder.record_path.read_text())


def test_the_printed_variables_can_be_pasted_if_the_folders_name_has_special_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Folder(tmp_path / "Zoë's federation")
    folder.tokens.mkdir(parents=True)
    folder.operator_token.write_text("fedssl_x")
    with answering({("GET", "/v1/runs"): {"items": []}}) as server:
        port = int(server.url.rpartition(":")[2])
        record = Record(channels=1, image_size=16, num_images={"a": 1}, port=port)
        _introduce(Federation(folder, record, Supervisor(tmp_path)), Format.TABLE)
    [line] = [line for line in capsys.readouterr().out.splitlines() if "export" in line]
    assert shlex.split(line) == ["export", f"FEDSSL_URL={server.url}", f"FEDSSL_TOKEN_FILE={folder.operator_token}"]


def test_an_encoder_needs_its_client() -> None:
    assert encoders_of(["a=resnet18"])["a"].name == "resnet18"
    with pytest.raises(UsageError, match="--encoder resnet18: write it as CLIENT=ENCODER"):
        encoders_of(["resnet18"])
