"""Feature extraction: in eval mode, normalised and in order, without changing the encoder."""

from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import torch

from fedssl.data import ImageData
from fedssl.errors import DataError
from fedssl.evaluation import FineTuneSettings, ProbeSettings, extract_features, fine_tune, probe_encoder
from fedssl.models import build_encoder, initialised
from fedssl.precision import exact_float32
from fedssl.protocol.data import AugmentationConfig, DataConfig
from fedssl.protocol.model import EncoderConfig

CONFIG = DataConfig(channels=1, image_size=8, mean=(0.3,), std=(0.5,))
IMAGES = np.random.default_rng(0).integers(0, 256, (37, 1, 8, 8)).astype(np.uint8)


def _encoder() -> torch.nn.Module:
    encoder = initialised(lambda: build_encoder(EncoderConfig(widths=(4, 6)), 1), 0)
    with torch.no_grad():
        encoder(torch.rand(16, 1, 8, 8, generator=torch.Generator().manual_seed(0)))  # moves the running statistics
    return encoder


def test_features_do_not_depend_on_the_batches() -> None:
    encoder = _encoder()
    whole, pieces = (extract_features(encoder, ImageData(IMAGES), CONFIG, batch_size=size) for size in (64, 5))
    assert whole.shape == (37, 6)
    assert whole.dtype == torch.float32
    assert torch.allclose(whole, pieces, atol=1e-6)
    x = (torch.from_numpy(IMAGES).float() / 255 - 0.3) / 0.5
    with torch.no_grad():
        assert torch.allclose(whole, encoder.eval()(x), atol=1e-5)


def test_extraction_leaves_the_encoder_unchanged() -> None:
    encoder = _encoder()
    next(encoder.children()).eval()
    flags = [module.training for module in encoder.modules()]
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    features = extract_features(encoder, ImageData(IMAGES), CONFIG)
    assert not features.requires_grad
    assert [module.training for module in encoder.modules()] == flags
    assert all(torch.equal(before[name], tensor) for name, tensor in encoder.state_dict().items())


def test_memory_mapped_images_have_the_same_features(tmp_path: Path) -> None:
    path = tmp_path / "images.npy"
    np.save(path, IMAGES)
    mapped = ImageData(np.load(path, mmap_mode="r"))
    encoder = _encoder()
    expected = extract_features(encoder, ImageData(IMAGES), CONFIG)
    assert torch.equal(extract_features(encoder, mapped, CONFIG), expected)


def test_images_of_a_wrong_shape_are_refused_and_no_images_give_no_features() -> None:
    with pytest.raises(DataError, match="conform"):
        extract_features(_encoder(), ImageData(IMAGES), DataConfig(channels=1, image_size=16))
    assert len(extract_features(_encoder(), ImageData(IMAGES[:0]), CONFIG)) == 0


class _Watching(torch.nn.Module):
    """Records whether cuDNN may round to TF32, and accepts only normalised images."""

    def __init__(self, seen: list[bool]) -> None:
        super().__init__()
        self.seen, self.layer = seen, torch.nn.Linear(64, 3)

    def __deepcopy__(self, memo: object) -> "_Watching":
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(torch.backends.cudnn.allow_tf32)
        assert x.min() < 0, "with this mean, images that are not normalised have no negative numbers"
        features: torch.Tensor = self.layer(x.flatten(1))
        return features


@pytest.mark.parametrize("what", ["features", "probe", "fine_tuning"])
def test_no_encoder_is_evaluated_in_tf32(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def as_on_a_gpu(device: object) -> AbstractContextManager[None]:
        return exact_float32("cuda")

    monkeypatch.setattr(f"fedssl.evaluation.{what}.exact_float32", as_on_a_gpu)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    labelled = ImageData(IMAGES, np.arange(37) % 2)
    seen: list[bool] = []
    encoder = _Watching(seen)
    if what == "features":
        extract_features(encoder, labelled, CONFIG)
    if what == "probe":
        views = ProbeSettings(optimizer="sgd", epochs=1, augmentation=AugmentationConfig())
        probe_encoder(encoder, labelled, labelled, CONFIG, settings=views)
        seen[:] = seen[2:]  # those of features
    if what == "fine_tuning":
        fine_tune(encoder, labelled, labelled, CONFIG, settings=FineTuneSettings(epochs=1))
        seen[:] = seen[1:]
    assert seen
    assert not any(seen)
    assert torch.backends.cudnn.allow_tf32
