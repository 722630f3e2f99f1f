"""Transfer: images of another shape are conformed to the encoder's, probed, and used for fine-tuning."""

import dataclasses

import numpy as np
import torch

from fedssl.data import ImageData, conform, load_dataset
from fedssl.evaluation import TRANSFERS, fine_tune, probe_encoder, transfer
from fedssl.models import build_encoder, initialised
from fedssl.protocol.data import DataConfig
from fedssl.protocol.model import EncoderConfig

CONFIG = DataConfig(channels=3, image_size=24)


def _other_shape(split: str) -> ImageData:
    """Return digits of 16 x 16 pixels and one channel, for an encoder of 24 x 24 pixels and three channels."""
    return load_dataset("digits", "train" if split == "train" else "test").subset(np.arange(300))


def test_fedus_transfer_tunes_all_weights_for_100_epochs() -> None:
    settings = TRANSFERS["fedu"]
    assert settings.epochs == 100
    assert settings.encoder_learning_rate is not None, "all is tuned"


def test_probe_and_fine_tuning_equal_those_of_the_conformed_images() -> None:
    encoder = initialised(lambda: build_encoder(EncoderConfig(widths=(8, 16)), 3), 0)
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    train, test = _other_shape("train"), _other_shape("test")
    tuning = dataclasses.replace(TRANSFERS["fast"], epochs=3, augmentation=None)
    said: set[str] = set()
    found = transfer(encoder, train, test, CONFIG, tuning=tuning, on_progress=lambda what, share: said.add(what))
    fitting = conform(train, CONFIG), conform(test, CONFIG)
    assert fitting[0].images.shape == (300, 3, 24, 24)
    assert found.probe == probe_encoder(encoder, *fitting, CONFIG)
    assert found.fine_tuned == fine_tune(encoder, *fitting, CONFIG, settings=tuning)
    assert found.probe.accuracy > 0.5
    assert "fine-tuning" in said
    assert all(torch.equal(before[name], tensor) for name, tensor in encoder.state_dict().items())
    assert transfer(encoder, train, test, CONFIG).fine_tuned is None
