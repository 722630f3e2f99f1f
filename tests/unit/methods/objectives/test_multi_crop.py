"""Local crops and a second augmentation: the losses over all pairs of views, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import method_spec, shards
from support.rounds import Training, training

CROPS = {"num_crops": 2, "image_size": 4, "min_scale": 0.1, "max_scale": 0.4}
DATA = {"channels": 1, "image_size": 8}


def _client(name: str) -> Training:
    return training(method_spec(name, data={**DATA, "local_crops": CROPS}))


def _unit(x: Any) -> Any:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def _embedded(client: Training, images: list[torch.Tensor], *names: str) -> list[Any]:
    """Return the outputs of the modules for each batch of images by itself, in float64."""
    found = []
    with torch.no_grad():
        for x in images:
            for name in names:
                x = client.modules[name](x)
            found.append(x.double().numpy())
    return found


def _crops(client: Training, images: tuple[torch.Tensor, ...], *names: str) -> list[Any]:
    """Return the same outputs for all crops in one batch, crop by crop."""
    [joint] = _embedded(client, [torch.cat(images)], *names)
    return np.split(joint, len(images))


def test_byol_also_predicts_the_targets_from_crops() -> None:
    """There are two targets and four predictions: the loss is two times the mean over 2 + 2 * 2 pairs."""
    client = _client("fedbyol")
    batch = client.batch()
    p = _embedded(client, list(batch.views), "encoder", "projector", "predictor")
    z = _crops(client, batch.local_views, "encoder", "projector")
    joint = torch.from_numpy(np.concatenate(z)).float()
    p += np.split(_embedded(client, [joint], "predictor")[0], 2)
    t = _embedded(client, list(batch.views), "target_encoder", "target_projector")
    pairs = [(p[v], t[u]) for u in range(2) for v in range(4) if u != v]
    losses = [(2 - 2 * (_unit(a) * _unit(b)).sum(axis=1)).mean() for a, b in pairs]
    assert len(losses) == 6
    assert client.values(batch)["regression"] == pytest.approx(2 * np.mean(losses), rel=1e-4)


def test_simclr_contrasts_all_views_and_crops_of_an_image() -> None:
    """There are four views and crops per image: each has three positives, and those of other images are negatives."""
    client = _client("fedsimclr")
    batch = client.batch()
    [joint] = _embedded(client, [torch.cat(batch.views)], "encoder", "projector")
    z = [*np.split(joint, 2), *_crops(client, batch.local_views, "encoder", "projector")]

    unit, image = _unit(np.concatenate(z)), np.tile(np.arange(len(z[0])), 4)
    terms = np.exp(unit @ unit.T / client.ctx.spec.method.temperature)  # type: ignore[union-attr]
    negatives = (terms * (image[:, None] != image)).sum(axis=1, keepdims=True)
    losses = np.log(terms + negatives) - np.log(terms)
    pairs = (image[:, None] == image) & ~np.eye(len(image), dtype=bool)
    assert pairs.sum() == len(z[0]) * 4 * 3
    expected = losses[pairs].mean()
    assert client.values(batch)["nt_xent"] == pytest.approx(expected, rel=1e-4)


def test_moco_also_predicts_the_keys_of_the_views_from_crops() -> None:
    client = _client("fedmoco")
    batch = client.batch()
    q = _embedded(client, list(batch.views), "encoder", "projector")
    q += _crops(client, batch.local_views, "encoder", "projector")
    k = _embedded(client, list(batch.views), "key_encoder", "key_projector")
    queue = client.modules["queue"]().double().numpy()
    temperature = client.ctx.spec.method.contrast_temperature  # type: ignore[union-attr]

    def info_nce(query: Any, key: Any) -> float:
        query, key = _unit(query), _unit(key)
        positive = (query * key).sum(axis=1, keepdims=True)
        logits = np.concatenate([positive, query @ queue.T], axis=1) / temperature
        return float((np.log(np.exp(logits).sum(axis=1)) - logits[:, 0]).mean())

    losses = [info_nce(q[v], k[u]) for u in range(2) for v in range(4) if u != v]
    assert client.values(batch)["info_nce"] == pytest.approx(2 * np.mean(losses), rel=1e-4)


def test_the_second_view_has_its_own_augmentation() -> None:
    """The first view is the image itself, and the second one is solarised: 1 - x from one half on."""
    none = {"preset": "none"}
    plain = training(method_spec("fedsimclr", data={**DATA, "augmentation": none})).batch()
    second = {**none, "solarize": 1.0}
    batch = training(method_spec("fedsimclr", data={**DATA, "augmentation": none, "second_view": second})).batch()
    assert torch.equal(batch.views[0], plain.views[0])
    x = plain.views[0]
    assert torch.equal(batch.views[1], torch.where(x >= 0.5, 1 - x, x))
    assert not torch.equal(batch.views[1], x)


@pytest.mark.parametrize(
    ("method", "data", "why"),
    [
        ("feddino", {"local_crops": {"image_size": 9}}, "larger than the images .data.image_size 8.: lower it"),
        ("feddino", {"local_crops": {"image_size": 4, "min_scale": 0.5}}, "must not exceed local_crops.max_scale"),
        (
            "fedbyol",
            {"local_crops": {"image_size": 4}, "augmentation": {"crop": "padded"}},
            "set data.augmentation.crop",
        ),
        ("fedvicreg", {"local_crops": {"image_size": 4}}, "no paper defines the loss of fedvicreg over local crops"),
        ("fedprotocl", {"local_crops": {"image_size": 4}}, "no paper defines the loss of fedprotocl"),
        ("supervised", {"local_crops": {"image_size": 4}}, "no paper defines the loss of supervised"),
        ("supervised", {"second_view": {"blur": 0.1}}, "supervised takes only one: leave it out"),
    ],
)
def test_unsupported_views_and_crops_are_refused(method: str, data: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        method_spec(method, data={**DATA, **data})


def test_crops_cannot_be_combined_with_masked_embeddings() -> None:
    def spec(variant: str) -> RunSpec:
        method = {"name": "fedsimclr", "add_ons": [{"name": "hsd", "variant": variant}]}
        return method_spec("fedsimclr", method=method, data={**DATA, "local_crops": CROPS})

    assert spec("projection").data.local_crops is not None
    with pytest.raises(ValidationError, match="hsd masks the embeddings of the two views, and not those of crops"):
        spec("mask")


def test_the_size_of_crops_must_be_a_multiple_of_the_patches() -> None:
    model = {"encoder": {"name": "vit-tiny", "patch_size": 4}}
    with pytest.raises(ValidationError, match=r"image_size is 6, which is not a multiple of the patches of vit-tiny"):
        method_spec("feddino", data={**DATA, "local_crops": {"image_size": 6}}, model=model)


@pytest.mark.full
def test_micro_batches_and_blurred_crops_train() -> None:
    crops = {**CROPS, "blur": 1.0}
    spec = method_spec(
        "feddino",
        data={**DATA, "local_crops": crops, "second_view": {"solarize": 0.2}},
        training={"batch_size": 32, "num_micro_batches": 2},
    )
    result = simulate(spec, shards(spec))
    assert all(torch.isfinite(tensor.float()).all() for tensor in result.model.values())
    assert result.history[-1].loss is not None
