"""Transfer: an encoder trained on one data set is evaluated on another.

FedU does so in section 4.4, SSD in its tables on other data sets.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import torch
from torch import nn

from fedssl.data import ImageData, conform
from fedssl.evaluation.fine_tuning import FineTuneResult, FineTuneSettings, fine_tune
from fedssl.evaluation.probe import PROBES, ProbeResult, ProbeSettings, probe_encoder
from fedssl.protocol.data import AugmentationConfig, DataConfig

# FedU states that the whole network is tuned for 100 epochs; the rest is as in its training, with crops and flips.
_FEDU = FineTuneSettings(
    encoder_learning_rate=0.032,
    head_learning_rate=0.032,
    schedule="cosine",
    weight_decay=5e-4,
    epochs=100,
    evaluate_every=10,
    augmentation=AugmentationConfig(crop="padded", padding=4, flip=0.5, jitter=0, greyscale=0),
)

TRANSFERS: Final = MappingProxyType({"fast": replace(_FEDU, epochs=20, evaluate_every=20), "fedu": _FEDU})
"""Settings for tuning the whole network on the other data set. Other papers use a linear probe only, if anything."""


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The results of a transfer.

    Attributes:
        probe: for the frozen representations.
        fine_tuned: for the whole network; None if it was not tuned.
    """

    probe: ProbeResult
    fine_tuned: FineTuneResult | None


def transfer(
    encoder: nn.Module,
    train: ImageData,
    test: ImageData,
    config: DataConfig,
    *,
    probe: ProbeSettings = PROBES["fast"],
    tuning: FineTuneSettings | None = None,
    device: torch.device | str = "cpu",
    on_progress: Callable[[str, float], None] = lambda what, share: None,
) -> TransferResult:
    """Evaluate an encoder on labelled images of another data set.

    Args:
        encoder: from images of `config`'s shape to (B, H); it is moved to `device` and otherwise unchanged.
        train, test: labelled images of any shape, which are converted to the encoder's.
        config: shape and normalisation that the encoder was trained with.
        probe: settings of :data:`~fedssl.evaluation.PROBES`, or your own.
        tuning: settings of :data:`TRANSFERS`, or your own; with None only the linear probe is trained.
        on_progress: called with the name of the current step and the share of it that is done.

    Raises:
        DataError: a set has no labels or no images.
    """
    train, test = conform(train, config), conform(test, config)
    encoder.to(device)
    probed = probe_encoder(
        encoder, train, test, config, settings=probe, device=device,
        on_progress=lambda share: on_progress("linear probe", share),
    )  # fmt: skip
    if tuning is None:
        return TransferResult(probed, None)
    tuned = fine_tune(
        encoder, train, test, config, settings=tuning, device=device,
        on_progress=lambda share: on_progress("fine-tuning", share),
    )  # fmt: skip
    return TransferResult(probed, tuned)
