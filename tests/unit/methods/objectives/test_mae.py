"""FedMAE: its loss against an independent one, its masks, what it sends, and what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedssl.evaluation.suite import load_encoder
from fedssl.methods import METHODS
from fedssl.methods.composition.part import MaskedTokens
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import method_spec, shards
from support.rounds import Training, local_round, start, training

SMALL = {"mask_ratio": 0.5, "decoder_width": 16, "decoder_depth": 1}


def _spec(**settings: Any) -> RunSpec:
    partition = {"dataset": "digits", "num_clients": 3, "alpha": 0.5, "max_images": 96}
    return method_spec(
        "fedmae",
        method={"name": "fedmae", **SMALL, **settings},
        partition=partition,
        training={"batch_size": 16, "optimizer": {"name": "adamw", "learning_rate": 1e-3}},
    )


def _masked(client: Training, batch: Any) -> MaskedTokens:
    online = client.algorithm.host.online(client.modules, batch, client.ctx)
    assert online is not None
    assert online.masked is not None
    return online.masked


@pytest.mark.parametrize("normalize", [True, False])
def test_the_loss_is_the_mean_squared_error_of_hidden_patches(normalize: bool) -> None:  # noqa: FBT001
    """The pixels are cut and standardised again in float64, patch by patch."""
    client, other = (training(_spec(normalize_pixels=normalize)) for _ in range(2))
    batch = client.batch()
    with torch.no_grad():
        tokens, restore, mask = _masked(other, batch)
        predicted = other.modules["decoder"](tokens, restore).double().numpy()
    errors = []
    for image, image_predicted, hidden in zip(batch.views[0].double().numpy(), predicted, mask.tolist(), strict=True):
        for number in range(4):
            row, column = divmod(number, 2)
            pixels = image[0, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4].reshape(-1)
            if normalize:
                pixels = (pixels - pixels.mean()) / np.sqrt(pixels.var(ddof=1) + 1e-6)
            if hidden[number]:
                errors.append(float(((image_predicted[number] - pixels) ** 2).mean()))
    assert len(errors) == 2 * len(batch.indices)
    assert client.values(batch)["reconstruction"] == pytest.approx(float(np.mean(errors)), rel=1e-4)


def test_masks_differ_by_image_step_round_and_client_and_are_reproducible() -> None:
    spec = _spec()
    client, again, later, other = (
        training(spec), training(spec), training(spec, number=2), training(spec, "client-1")
    )  # fmt: skip
    batch = client.batch()
    first, second = _masked(client, batch).mask, _masked(client, batch).mask
    assert not torch.equal(first, second)
    assert len({tuple(row) for row in first.tolist()}) > 1
    assert torch.equal(first, _masked(again, batch).mask)
    assert not torch.equal(first, _masked(later, batch).mask)
    assert not torch.equal(first, _masked(other, batch).mask)


def test_the_decoder_is_sent_but_not_part_of_the_evaluated_encoder() -> None:
    spec = _spec()
    plan = METHODS["fedmae"].bind(spec).plan
    assert {each.name.split(".")[0] for each in plan.update} == {"encoder", "decoder"}
    assert plan.update == plan.broadcast
    first = start(spec)
    result = local_round(spec, first.broadcast)
    assert result.state == {}
    assert not torch.equal(result.update["decoder.mask_token"], first.broadcast["decoder.mask_token"])
    encoder = load_encoder(result.update, spec)
    assert encoder(torch.zeros(2, 1, 8, 8)).shape == (2, 192)


@pytest.mark.full
@pytest.mark.parametrize(
    "parts",
    [
        {"add_ons": [{"name": "proximal"}, {"name": "decorrelation", "on": "h"}, {"name": "fur"}]},
        {"reducer": {"name": "ldawa"}, "merge": {"name": "ema"}},
        {"merge": {"name": "local"}, "reducer": {"name": "none"}},
    ],
)
def test_fedmae_trains_with_the_other_parts(parts: dict[str, Any]) -> None:
    spec = _spec(**parts)
    result = simulate(spec, shards(spec))
    assert all(bool(tensor.isfinite().all()) for tensor in result.model.values())


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"mask_ratio": 0.8}, "leaves 0 of 4 patches visible"),
        ({"mask_ratio": 0.0}, "greater than 0"),
        ({"decoder_width": 18}, "multiple of decoder_heads"),
        ({"decoder_width": 10, "decoder_heads": 5}, "and of 4"),
        ({"add_ons": [{"name": "fedx"}]}, "does not compute them"),
        ({"add_ons": [{"name": "pd"}]}, "needs a projector"),
        ({"merge": {"name": "dapu"}}, "does not have one"),
    ],
)
def test_invalid_settings_and_unsupported_parts_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        _spec(**settings)


@pytest.mark.parametrize("name", ["convnet", "resnet18"])
def test_encoders_without_patches_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name} does not cut images into any: set model.encoder.name"):
        method_spec("fedmae", model={"encoder": {"name": name}})


def test_adapters_can_be_trained() -> None:
    values = _spec().model_dump(mode="json")
    values["model"]["lora"] = {"rank": 2, "layers": ["blocks.0.attn.*"]}
    spec = RunSpec.model_validate(values)
    sent = {each.name for each in METHODS["fedmae"].bind(spec).plan.update if each.name.startswith("encoder.")}
    assert len(sent) == 4
    assert set(local_round(spec, start(spec).received).update) > sent
