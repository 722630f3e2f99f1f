"""Milliseconds of a fine-tuning step in exact float32, per memory format of the network and the images.

    PYTHONPATH=tests python tests/bench/measure_exact_layouts.py --device cuda

It trains a ResNet-18 for images of 32 pixels as SSD's fine-tuning does, in batches of 128, with both formats in turn.
"""

import argparse
import itertools
import statistics
import sys
import time
from dataclasses import replace
from unittest import mock

import numpy as np
import torch

from fedssl.data import ImageData
from fedssl.evaluation import FINE_TUNINGS, fine_tune, fine_tuning
from fedssl.models.encoders import build_encoder
from fedssl.protocol.data import DataConfig
from fedssl.protocol.model import EncoderConfig

DATA = DataConfig(channels=3, image_size=32)
LAYOUTS = (torch.channels_last, torch.contiguous_format)


def random_images(num_images: int) -> ImageData:
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (num_images, 3, 32, 32), dtype=np.uint8)
    return ImageData(images=pixels, labels=np.arange(num_images) % 10)


def milliseconds(layout: torch.memory_format, device: torch.device, num_steps: int, turns: int) -> list[float]:
    """Return the milliseconds of a step in each turn, after one turn that is not measured."""
    settings = replace(FINE_TUNINGS["ssd"], epochs=turns + 1, evaluate_every=turns + 1)
    train, test, ends = random_images(num_steps * settings.batch_size), random_images(10), list[float]()

    def at_the_end_of_an_epoch(_: float) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ends.append(time.perf_counter())

    encoder = build_encoder(EncoderConfig(name="resnet18"), 3, 32)
    with mock.patch.object(fine_tuning, "exact_layout", return_value=layout):
        fine_tune(encoder, train, test, DATA, settings=settings, device=device, on_progress=at_the_end_of_an_epoch)
    # The last epoch also tests the network, on ten images.
    return [1e3 * (end - start) / num_steps for start, end in itertools.pairwise(ends)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--steps", type=int, default=20, help="steps per turn")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    for layout in LAYOUTS:
        found = milliseconds(layout, options.device, options.steps, options.turns)
        sys.stdout.write(f"{layout}: {statistics.median(found):.1f} ms ({min(found):.1f} to {max(found):.1f})\n")


if __name__ == "__main__":
    main()
