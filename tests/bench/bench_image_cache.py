"""The cost of caching the images of a folder, and of reading batches from the cache against reading from memory.

    python tests/bench/bench_image_cache.py --images 100000     JPEG files of 256 x 340 pixels
    make bench ARGS="-k image_cache -s"                         fewer ones, asserted

- Decoding: images per second of Pillow by itself (open, convert, resize, one process), and of the cache, with one
  process and with several.
- Memory: what a process needs beyond its start to load the cache and read batches from it, anonymous memory, for a
  hundredth of the images and for all. The kernel's copy of the file is not counted: the kernel gives it up when memory
  is needed.
- Reading: images per second of views (crop, colour, normalisation) from the cache and from memory.
- Training: images per second of steps of a ResNet-18 at 224 pixels, whose views come from the cache and from memory.
"""

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fedssl.data.image_batches import random_views, take_each
from fedssl.data.image_cache import load_cached
from fedssl.models import build_encoder
from fedssl.protocol.data import DataConfig
from fedssl.protocol.model import EncoderConfig

_DATA = DataConfig(channels=3, image_size=224, cache_size=256)
_SHAPE = (288, 384)
_BATCH = 64
_TRAINED, _STEPS = 8, 6


def write_images(folder: Path, count: int) -> None:
    """Write JPEG files with the detail of photographs; only 50 differ, and each has its own name and comment."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    originals = []
    for _ in range(min(count, 50)):
        coarse = Image.fromarray(rng.integers(0, 256, (36, 48, 3), np.uint8)).resize(
            _SHAPE[::-1], Image.Resampling.BICUBIC
        )
        noisy = np.asarray(coarse, np.int16) + rng.integers(-8, 8, (*_SHAPE, 3))
        originals.append(Image.fromarray(noisy.clip(0, 255).astype(np.uint8)))
    for number in range(count):
        originals[number % len(originals)].save(folder / f"{number:06}.jpg", quality=85, comment=str(number))


def by_pillow(folder: Path, most: int = 500) -> float:
    """Return the images per second of Pillow by itself, in one process."""
    paths = sorted(folder.iterdir())[:most]
    started = time.perf_counter()
    for path in paths:
        with Image.open(path) as image:
            shorter = min(image.size)
            image.convert("RGB").resize(
                tuple(round(side * 256 / shorter) for side in image.size), Image.Resampling.BILINEAR
            )
    return len(paths) / (time.perf_counter() - started)


def by_cache(folder: Path, processes: int) -> float:
    """Return the images per second with which a cache is made."""
    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)
    started = time.perf_counter()
    count = len(load_cached(str(folder), _DATA, processes=processes))
    return count / (time.perf_counter() - started)


def reading(folder: Path, num_batches: int) -> dict[str, float]:
    """Return the images per second of views from the cache and from memory, and the anonymous memory of the former."""
    before = anonymous_bytes()
    images = load_cached(str(folder), _DATA).images
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    batches = list(order[: num_batches * _BATCH].split(_BATCH))
    count = sum(map(len, batches))

    def rate(source) -> float:  # type: ignore[no-untyped-def]
        started, generator = time.perf_counter(), torch.Generator().manual_seed(1)
        for batch in take_each(source, batches):
            random_views(batch, _DATA, generator)
        return count / (time.perf_counter() - started)

    rate(images)
    streamed, memory = rate(images), anonymous_bytes() - before
    held = images.subset(order[:count].numpy()).resident(torch.device("cpu"))
    images = images.subset(order[:count].numpy())
    batches = list(torch.arange(count).split(_BATCH))
    found = {"cache": streamed, "memory": rate(held), "anonymous_mb": memory / 1e6}
    encoder = build_encoder(EncoderConfig(name="resnet18", stem="imagenet"), 3, _DATA.image_size)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=1e-3)
    few = [batch[:_TRAINED] for batch in batches[:_STEPS]]

    def training_rate(source) -> float:  # type: ignore[no-untyped-def]
        started, generator = time.perf_counter(), torch.Generator().manual_seed(2)
        for batch in take_each(source, few):
            optimizer.zero_grad()
            encoder(random_views(batch, _DATA, generator)).square().mean().backward()
            optimizer.step()
        return sum(map(len, few)) / (time.perf_counter() - started)

    training_rate(held)
    pairs = [(training_rate(images), training_rate(held)) for _ in range(2)]  # in turns, because other work slows both
    found["trained_cache"], found["trained_memory"] = (max(rates) for rates in zip(*pairs, strict=True))
    return found


def anonymous_bytes() -> int:
    """Return this process's anonymous memory after the allocator has returned what is free."""
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def measure(count: int, processes: int, num_batches: int) -> dict[str, float]:
    """Return all measurements, with each reading in a fresh process."""
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = f"{name}/cache"
        found: dict[str, float] = {}
        for part, size in (("few", max(count // 100, 100)), ("all", count)):
            folder = Path(name) / part
            write_images(folder, size)
            if part == "few":
                found |= {"pillow": by_pillow(folder), "one": by_cache(folder, 1)}
            found["several"] = by_cache(folder, processes)
            text = subprocess.check_output(
                [sys.executable, __file__, "--read", str(folder), "--batches", str(num_batches)]
            )
            found |= {f"{key}_{part}": value for key, value in json.loads(text).items()}
            print(json.dumps(found), file=sys.stderr, flush=True)  # noqa: T201
        return found


def test_the_image_cache_is_fast_and_its_memory_does_not_grow_with_the_images() -> None:
    found = measure(1000, 2, 10)
    print(json.dumps(found, indent=2))  # noqa: T201
    assert found["one"] > 0.3 * found["pillow"]
    assert found["cache_all"] > 0.4 * found["memory_all"]
    assert found["trained_cache_all"] > 0.9 * found["trained_memory_all"]
    assert found["anonymous_mb_all"] < found["anonymous_mb_few"] + 50


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--read", type=Path, help="only read this folder's cache")
    arguments = parser.parse_args()
    if arguments.read is not None:
        print(json.dumps(reading(arguments.read, arguments.batches)))  # noqa: T201
    else:
        print(json.dumps(measure(arguments.images, arguments.processes, arguments.batches), indent=2))  # noqa: T201
