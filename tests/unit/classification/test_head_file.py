"""Classifier files: a written file is read back, and any other file is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedssl.classification.head_file import MAX_HEAD_BYTES, read_head, require_encoder, write_head
from fedssl.embeddings.encoders import Model, load_model
from fedssl.errors import FedSSLError, SpecError
from fedssl.models.classifier import Head
from support.encoder_folders import SMALL_DATA, write_encoder_folder
from support.federation import tiny_spec

ABOUT = {"encoder": {"sha256": "0" * 64}, "preprocessing": {"channels": 3}, "fit": {"num_images": 7}}
DOCUMENT = {"version": 1, "classes": ["a", "b"], "multi_label": False, **ABOUT}


def head(weight: torch.Tensor | None = None) -> Head:
    weight = torch.arange(8.0).view(2, 4) if weight is None else weight
    return Head(weight, torch.tensor([0.5, -1.0]), ("a", "ü, b"), multi_label=False, about=ABOUT)


def test_a_written_classifier_is_read_back_and_equal_ones_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "other"):
        write_head(head(), tmp_path / "new" / f"{name}.safetensors")
    found = read_head(tmp_path / "new" / "one.safetensors")
    assert torch.equal(found.weight, head().weight)
    assert torch.equal(found.bias, head().bias)
    assert (found.class_names, found.multi_label, found.about) == (head().class_names, False, ABOUT)
    one, other = ((tmp_path / "new" / f"{name}.safetensors").read_bytes() for name in ("one", "other"))
    assert one == other


def test_probabilities_are_a_softmax_or_sigmoids() -> None:
    one = Head(torch.eye(2), torch.zeros(2), ("a", "b"), multi_label=False)
    several = Head(torch.eye(2), torch.zeros(2), ("a", "b"), multi_label=True)
    h_NH = torch.tensor([[1.0, 0.0]])
    torch.testing.assert_close(one.probabilities(h_NH), torch.tensor([[0.7310586, 0.2689414]]))
    torch.testing.assert_close(several.probabilities(h_NH), torch.tensor([[0.7310586, 0.5]]))


@pytest.mark.parametrize(
    ("tensors", "document", "reason"),
    [
        ({"weight": torch.zeros(2, 4)}, DOCUMENT, "another kind of file"),
        ({"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}, None, "another kind of file"),
        ({"weight": torch.zeros(3, 4), "bias": torch.zeros(3)}, DOCUMENT, "for 2 classes"),
        ({"weight": torch.zeros(2, 4), "bias": torch.zeros(3)}, DOCUMENT, "for 2 classes"),
        ({"weight": torch.zeros(2, 4).double(), "bias": torch.zeros(2)}, DOCUMENT, "for 2 classes"),
        ({"weight": torch.zeros(2, 4), "bias": torch.tensor([0, torch.nan])}, DOCUMENT, "not finite"),
        ({"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}, {**DOCUMENT, "version": 2}, "description"),
        ({"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}, {**DOCUMENT, "classes": 3}, "description"),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], document: dict[str, object] | None, reason: str
) -> None:
    metadata = None if document is None else {"fedssl": json.dumps(document)}
    save_file(tensors, tmp_path / "head.safetensors", metadata)
    with pytest.raises(SpecError, match=f"{reason}.*fedssl classify"):
        read_head(tmp_path / "head.safetensors")


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FedSSLError, match="missing"):
        read_head(tmp_path / "missing.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors")
    with pytest.raises(SpecError, match="text"):
        read_head(tmp_path / "text.safetensors")
    with (tmp_path / "large.safetensors").open("wb") as file:
        file.truncate(MAX_HEAD_BYTES + 1)
    with pytest.raises(SpecError, match="another file"):
        read_head(tmp_path / "large.safetensors")
    with pytest.raises(SpecError, match="must end in"):
        write_head(head(), tmp_path / "head.bin")


def test_a_classifier_of_another_encoder_is_refused(tmp_path: Path, model: Model) -> None:
    own = Head(torch.zeros(2, model.encoder.feature_dim), torch.zeros(2), ("a", "b"), False, model.identity())
    require_encoder(own, model, "head")
    (tmp_path / "other").mkdir()
    write_encoder_folder(tmp_path / "other", tiny_spec(data=SMALL_DATA))
    with pytest.raises(SpecError, match="head was fitted to another encoder"):
        require_encoder(own, load_model(tmp_path / "other"), "head")
    narrow = Head(torch.zeros(2, 3), torch.zeros(2), ("a", "b"), False, model.identity())
    with pytest.raises(SpecError, match="takes 3 numbers per image"):
        require_encoder(narrow, model, "head")
