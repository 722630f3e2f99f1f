"""Images on a GPU: cached images, in its memory or read from the file, and image files that are embedded."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedssl.classification.classify import classify
from fedssl.classification.fit import fit_head
from fedssl.classification.labelled import open_labelled
from fedssl.data.image_batches import random_views, take_each
from fedssl.data.image_cache import CachedData, load_cached
from fedssl.embeddings.embed import embed
from fedssl.embeddings.encoders import load_model
from fedssl.embeddings.index_file import read_index
from fedssl.embeddings.similarity import find_duplicates, find_outliers
from fedssl.embeddings.sources import open_source
from fedssl.protocol.data import DataConfig
from support.encoder_folders import make_small_model

DEVICE = "cuda"
DATA = DataConfig(channels=3, image_size=16, cache_size=24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two classes of images of different sizes, which differ in their colour."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for number in range(60):
        name, colour = (("blue", (40, 60, 200)), ("red", (200, 60, 40)))[number % 2]
        pixels = np.array(colour) + random.normal(0, 40, (*random.integers(20, 60, 2), 3))
        (folder / name).mkdir(exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / name / f"{number:02}.png")
    return folder


def test_views_of_cached_images_equal_the_cpus(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached = load_cached(str(folder), DATA, processes=1)
    assert isinstance(cached, CachedData)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    resident = cached.images.to(DEVICE)
    streamed = cached.images._with(  # as for a data set that does not fit into the GPU's memory
        cached.images.offsets, cached.images.sizes, cached.images.digests, torch.device(DEVICE), None
    )
    expected = [
        random_views(batch, DATA, torch.Generator().manual_seed(1))
        for batch in take_each(cached.images, order.split(16))
    ]
    for images in (resident, streamed):
        for batch, wanted in zip(take_each(images, order.split(16)), expected, strict=True):
            assert batch.pixels.device.type == DEVICE
            views = random_views(batch, DATA, torch.Generator().manual_seed(1))
            torch.testing.assert_close(views.cpu(), wanted, rtol=1e-4, atol=1e-4)
        apart = images[:10].cpu().int() - cached.images[:10].int()
        assert apart.abs().max() <= 1  # the value between two pixels is rounded to one of 256


def test_files_are_embedded_and_classified_as_on_the_cpu(folder: Path, tmp_path: Path) -> None:
    make_small_model(tmp_path / "run")
    found = []
    for number, device in enumerate(("cpu", DEVICE)):
        model, out = load_model(tmp_path / "run"), tmp_path / f"{number}.npz"
        embed(open_source(str(folder), None, None), model, "run", out, device=device)
        head = fit_head(open_labelled(str(folder), None), model, device=device).head
        classified = classify(
            open_source(str(folder), None, None), model, head, tmp_path / f"{number}.csv", device=device
        )
        found.append((read_index(out).representations, head.weight, classified.num_predicted))
    (h, _, _), (on_gpu, _, predicted) = found
    assert predicted["red"] + predicted["blue"] == 60
    np.testing.assert_allclose(on_gpu, h, rtol=1e-4, atol=1e-5)
    pairs = [find_duplicates(h, 0.999, 10, device) for device in ("cpu", DEVICE)]
    assert pairs[0].num_pairs == pytest.approx(pairs[1].num_pairs, rel=0.01, abs=1)
    outliers = [find_outliers(h, 2, 3, device)[0] for device in ("cpu", DEVICE)]
    assert outliers[1].cosine == pytest.approx(outliers[0].cosine, abs=1e-5)
