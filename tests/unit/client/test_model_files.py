"""Encoders in separate files, and specs that can be read back."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedssl.artifacts.tensors import load_tensors, save_tensors
from fedssl.cli.specs import read_spec
from fedssl.client.model_files import export_encoder, write_spec
from fedssl.errors import ArtifactError
from support.federation import tiny_spec

TENSORS = {
    "encoder.a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "encoder.steps": torch.tensor(7),
    "encoder.half": torch.ones(3, dtype=torch.bfloat16),
    "encoders.b": torch.zeros(2),
    "projector.w": torch.ones(4),
}


def test_only_the_encoder_is_copied_bit_for_bit(tmp_path: Path) -> None:
    save_tensors(TENSORS, tmp_path / "model")
    export_encoder(tmp_path / "model", tmp_path / "encoder")

    for exported in (load_file(tmp_path / "encoder"), load_tensors(tmp_path / "encoder")):
        assert exported.keys() == {"encoder.a", "encoder.steps", "encoder.half"}
        assert all(torch.equal(exported[name], TENSORS[name]) for name in exported)
    assert int.from_bytes((tmp_path / "encoder").read_bytes()[:8], "little") % 8 == 0, "tensors begin aligned"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["encoder", "model"]


def test_a_model_without_an_encoder_is_refused(tmp_path: Path) -> None:
    save_tensors({"projector.w": torch.ones(4)}, tmp_path / "model")

    with pytest.raises(ArtifactError, match="encoder"):
        export_encoder(tmp_path / "model", tmp_path / "encoder")
    assert not (tmp_path / "encoder").exists()


def test_a_written_spec_is_read_back_unchanged(tmp_path: Path) -> None:
    spec = tiny_spec(name="two words", method={"name": "fedbyol"})
    write_spec(spec, tmp_path / "spec.yaml")

    assert read_spec(str(tmp_path / "spec.yaml")) == spec
