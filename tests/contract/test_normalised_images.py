"""Every part that embeds images normalises them with the mean and the standard deviation of the spec."""

from typing import Any

import pytest
import torch
from torch import nn

from fedssl.models import Encoder
from fedssl.simulation import simulate
from support.methods import method_spec, shards

# Pixels in 0..1 become numbers in -4..0, so a positive number comes from an image that was not normalised.
DATA = {"channels": 1, "image_size": 8, "mean": [1.0], "std": [0.25]}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("fedca", {}),  # it trains on the coordinator, and embeds views
        ("flesd", {}),  # it distils on the coordinator
        ("fedsimclr", {"data": {**DATA, "local_crops": {"num_crops": 2, "image_size": 4}}}),
        ("fedbyol", {"model": {"encoder": {"widths": [8, 16]}, "batch_norm": "recalibrate"}}),
        ("ridge-probe", {}),
    ],
)
def test_every_part_normalises_its_images(name: str, changes: dict[str, Any]) -> None:
    largest = []

    def record(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, Encoder) and not inputs[0].is_meta:
            largest.append(float(inputs[0].max()))

    spec = method_spec(name, num_rounds=1, **{"data": DATA, **changes})
    hook = nn.modules.module.register_module_forward_pre_hook(record)
    try:
        simulate(spec, shards(spec))
    finally:
        hook.remove()
    assert largest
    assert max(largest) <= 0
