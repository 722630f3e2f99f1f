"""Weight files: the names of every family are converted to one form, and files without an encoder are refused."""

import io
import json
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from fedssl.aggregation import fixed_point_mean
from fedssl.artifacts.header import LENGTH_BYTES, Header, read_header
from fedssl.artifacts.store import digest_of
from fedssl.artifacts.weight_files import (
    check_registered,
    conversion_command,
    read_weights,
    registered_digest,
    write_weights,
)
from fedssl.errors import ArtifactError, ArtifactTooLarge, NotFinite
from fedssl.models import build_encoder, import_torchvision
from fedssl.protocol.model import EncoderConfig


def resnet(name: str = "resnet18") -> dict[str, Tensor]:
    return dict(import_torchvision().models.get_model(name, weights=None).state_dict())


def small(**changes: Tensor) -> dict[str, Tensor]:
    return {"conv1.weight": torch.arange(18.0).reshape(2, 1, 3, 3), "bn1.num_batches_tracked": torch.tensor(7)} | {
        name.replace("__", "."): each for name, each in changes.items()
    }


def written(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    save_file(tensors, path, metadata)
    return path


def header_of(path: Path) -> Header:
    with path.open("rb") as file:
        return read_header(file)


def huggingface_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors named as in transformers' ResNetForImageClassification, without using the tested mapping."""
    renamed = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        leaf = parts[-1]
        if parts[0] == "conv1":
            new = "resnet.embedder.embedder.convolution.weight"
        elif parts[0] == "bn1":
            new = f"resnet.embedder.embedder.normalization.{leaf}"
        elif parts[0] == "fc":
            new = f"classifier.1.{leaf}"
        else:
            place = f"resnet.encoder.stages.{int(parts[0][5:]) - 1}.layers.{parts[1]}"
            kind = parts[2]
            if kind == "downsample":
                new = f"{place}.shortcut.{'convolution' if parts[3] == '0' else 'normalization'}.{leaf}"
            else:
                what = "convolution" if kind.startswith("conv") else "normalization"
                new = f"{place}.layer.{int(kind[-1]) - 1}.{what}.{leaf}"
        renamed[new] = tensor
    return renamed


@pytest.mark.full(but=1)
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_every_family_gives_the_same_file(tmp_path: Path, name: str) -> None:
    tensors = resnet(name)
    plain = read_weights(written(tmp_path / "a.safetensors", tensors))
    hugging = read_weights(written(tmp_path / "b.safetensors", huggingface_names(tensors), {"format": "pt"}))
    ours = {f"encoder.{key}": each for key, each in tensors.items()} | {"projector.0.weight": torch.zeros(3, 2)}
    own = read_weights(written(tmp_path / "c.safetensors", ours))
    assert (plain.family, hugging.family, own.family) == ("torchvision", "huggingface", "fedssl")
    assert own.left_out == ("projector.0.weight",)
    assert plain.left_out == hugging.left_out == ()
    digest = write_weights(plain, tmp_path / "registered.safetensors")
    assert (
        digest == registered_digest(hugging) == registered_digest(own) == digest_of(tmp_path / "registered.safetensors")
    )
    assert plain.source_digest == digest_of(tmp_path / "a.safetensors") != hugging.source_digest
    loaded = load_file(tmp_path / "registered.safetensors")
    assert loaded.keys() == {f"encoder.{key}" for key in tensors}
    assert all(torch.equal(loaded[f"encoder.{key}"], each) for key, each in tensors.items())
    parameters = sum(each.numel() for key, each in tensors.items() if not key.endswith("tracked"))
    assert check_registered(header_of(tmp_path / "registered.safetensors")) == parameters == plain.num_parameters


def test_the_registered_form_is_the_librarys_own(tmp_path: Path) -> None:
    weights = read_weights(written(tmp_path / "a.safetensors", small()))
    write_weights(weights, tmp_path / "b.safetensors")
    assert (tmp_path / "b.safetensors").read_bytes() == save({f"encoder.{key}": each for key, each in small().items()})
    again = read_weights(tmp_path / "b.safetensors")
    assert registered_digest(again) == again.source_digest


@pytest.mark.full(but=1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused_with_the_command_that_converts_it_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = every[every.isfinite()].reshape(1, 1, 1, -1)
    path = written(tmp_path / "a.safetensors", small(conv1__weight=finite))
    with pytest.raises(ArtifactError, match=r"conv1\.weight is B?F16: encoders start in F32") as refused:
        read_weights(path)
    words = shlex.split(str(refused.value).splitlines()[-1])
    assert words[:2] == ["python", "-c"]
    monkeypatch.setattr(sys, "argv", words[1:2] + words[3:])
    exec(words[2], {})
    weights = read_weights(tmp_path / "a-converted.safetensors")
    found = weights.arrays["encoder.conv1.weight"]
    assert found.dtype == np.float32
    assert weights.arrays["encoder.bn1.num_batches_tracked"].dtype == np.int64
    assert torch.equal(torch.from_numpy(found.copy()), finite.float())


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (small(conv1__weight=torch.zeros(2, dtype=torch.float64)), "F64, which float32 cannot hold exactly"),
        (small(conv1__weight=torch.zeros(2, dtype=torch.int8)), "is I8: .*before quantisation"),
        (small(bn1__num_batches_tracked=torch.tensor(1, dtype=torch.int32)), "counts batches and is I32"),
        ({"conv 1": torch.zeros(2)}, "name that no encoder can have"),
        ({"embedder.embedder.pooler": torch.zeros(2)}, "ResNets have no 'embedder.embedder.pooler'"),
        ({"resnet.embedder.embedder.convolution.weight": torch.zeros(2),
          "embedder.embedder.convolution.weight": torch.zeros(2)}, "are the same tensor, encoder.conv1.weight"),
        ({}, "has 0 tensors of an encoder"),
    ],
)  # fmt: skip
def test_tensors_that_no_encoder_can_have_are_refused(tmp_path: Path, tensors: dict[str, Tensor], reason: str) -> None:
    with pytest.raises(ArtifactError, match=reason):
        read_weights(written(tmp_path / "a.safetensors", tensors))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    tensors = small(conv1__weight=torch.tensor([0.0, value]))
    with pytest.raises(NotFinite, match=r"conv1\.weight holds NaN or infinity"):
        read_weights(written(tmp_path / "a.safetensors", tensors))


def test_negative_variances_are_refused(tmp_path: Path) -> None:
    """A BatchNorm layer would return NaN in evaluations, and in training if it is frozen."""
    path = written(tmp_path / "w.safetensors", small(**{"bn1.running_var": torch.tensor([1.0, -0.5])}))
    with pytest.raises(ArtifactError, match=r"w\.safetensors: tensor bn1\.running_var holds -0\.5, and no variance"):
        read_weights(path)


def test_the_fixed_point_mean_of_dead_channels_is_accepted(tmp_path: Path) -> None:
    name = "bn1.running_var"
    before = {name: torch.linspace(0.1, 0.4, 64)}
    after = fixed_point_mean([{name: torch.full((64,), 1e-10)}] * 2, [100, 77], before)
    assert after[name].min() < 0, "the difference from the broadcast was rounded"
    assert read_weights(written(tmp_path / "w.safetensors", small(**after))).arrays


def test_a_header_that_claims_ten_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes((10 << 30).to_bytes(8, "little") + b"{" * 100)
    with pytest.raises(ArtifactTooLarge, match="claims 10737418240 bytes"):
        read_weights(path)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"\0"])
def test_a_file_whose_size_differs_from_its_header_is_refused(tmp_path: Path, change: object) -> None:
    assert callable(change)
    path = written(tmp_path / "a.safetensors", small())
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ArtifactError, match="its header describes"):
        read_weights(path)


@pytest.mark.parametrize(
    ("name", "converted", "legacy"),
    [("it's.pth", "it's", False), pytest.param("a.safetensors", "a-converted", True, marks=pytest.mark.full)],
)
def test_the_command_in_the_refusal_converts_a_pickled_file(
    tmp_path: Path, name: str, converted: str, *, legacy: bool
) -> None:
    path = tmp_path / name
    torch.save({"state_dict": small(), "epoch": 3}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(ArtifactError, match="is pickled") as refused:
        read_weights(path)
    command = str(refused.value).splitlines()[-1]
    assert command == conversion_command(path)
    words = shlex.split(command)
    assert words[:4] == ["unshare", "--map-root-user", "--net", "python"]  # a container may forbid what these need
    assert "weights_only=True" in words[5]
    subprocess.run([sys.executable, *words[4:]], check=True, timeout=100)
    weights = read_weights(tmp_path / f"{converted}.safetensors")
    assert weights.arrays.keys() == {"encoder.conv1.weight", "encoder.bn1.num_batches_tracked"}


def test_an_arbitrary_zip_file_is_not_opened(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("archive/data.pkl", b"cos\nsystem\n(S'false'\ntR.")
    (tmp_path / "a.bin").write_bytes(packed.getvalue())
    with pytest.raises(ArtifactError, match="is pickled"):
        read_weights(tmp_path / "a.bin")


def test_a_header_of_128_bytes_is_not_mistaken_for_a_pickle(tmp_path: Path) -> None:
    text = json.dumps({"x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    for length in (128, 640):
        (tmp_path / "a").write_bytes(length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length))
        assert read_weights(tmp_path / "a").arrays.keys() == {"encoder.x"}


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"conv1.weight": torch.zeros(2)}, "begin with encoder"),
        ({"encoder.conv1.weight": torch.zeros(2, dtype=torch.float16)}, "is F16"),
        ({"encoder.bn1.num_batches_tracked": torch.zeros(())}, "is F32"),
    ],
)
def test_registered_files_are_checked_by_their_header(tmp_path: Path, tensors: dict[str, Tensor], reason: str) -> None:
    with pytest.raises(ArtifactError, match=reason):
        check_registered(header_of(written(tmp_path / "a.safetensors", tensors)))


def test_an_encoder_of_this_project_keeps_its_names(tmp_path: Path) -> None:
    encoder = build_encoder(EncoderConfig(widths=(2, 3)), 1)
    tensors = {f"encoder.{name}": each for name, each in encoder.state_dict().items()}
    assert read_weights(written(tmp_path / "a.safetensors", tensors)).arrays.keys() == tensors.keys()
