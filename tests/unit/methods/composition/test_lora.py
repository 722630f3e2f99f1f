"""Rounds that train adapters: only the adapters and the heads are trained and sent."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fedssl.artifacts.header import file_bytes, num_bytes
from fedssl.evaluation.suite import load_encoder
from fedssl.methods import METHODS
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate
from support.methods import method_spec, shards
from support.rounds import aggregate, local_round, start

RANK = 2


def lora_spec(name: str, method: dict[str, Any] | None = None, **model: Any) -> RunSpec:
    """Return a small spec that trains adapters of the first block's attention."""
    chosen: dict[str, Any] = {
        "encoder": {"name": "vit-tiny", "patch_size": 8, "depth": 2},
        "projector": {"hidden_dims": [16], "out_dim": 8},
        "predictor": {"hidden_dims": [16], "out_dim": 8},
        "lora": {"rank": RANK, "layers": ["blocks.0.attn.*"]},
        **model,
    }
    partition = {"dataset": "digits", "num_clients": 3, "alpha": 0.5, "max_images": 96}
    optimizer = {"learning_rate": 0.05} if name == "scaffold" else {"name": "adamw", "learning_rate": 1e-3}
    training = {"batch_size": 16, "optimizer": optimizer}
    return method_spec(
        name, method={"name": name, **(method or {})}, model=chosen, partition=partition, training=training
    )


ADAPTERS = {f"encoder.blocks.0.attn.{layer}.{part}" for layer in ("qkv", "proj") for part in ("lora_a", "lora_b")}


def test_the_plan_sends_only_adapters_and_heads() -> None:
    plan = METHODS["fedbyol"].bind(lora_spec("fedbyol")).plan
    sent = {each.name for each in plan.update}
    assert {name for name in sent if name.startswith("encoder.")} == ADAPTERS
    assert {name.split(".")[0] for name in sent} == {"encoder", "projector", "predictor"}
    assert {each.name for each in plan.broadcast} == sent
    assert "encoder.blocks.0.attn.qkv.lora_scale" in {each.name for each in plan.frozen if each.reduce == "keep"}


def test_an_update_has_the_bytes_of_the_formula() -> None:
    """There are r (in + out) numbers per layer: qkv maps 192 to 576 numbers, proj 192 to 192."""
    plans = [METHODS["fedsimclr"].bind(lora_spec("fedsimclr", **model)).plan for model in ({}, {"projector": None})]
    numbers = RANK * (192 + 576) + RANK * (192 + 192)
    sizes = [sum(num_bytes(each.dtype, each.shape) for each in plan.update) for plan in plans]
    head = 192 * 16 + 4 * 16 + 16 * 8 + 8  # BatchNorm has a weight, a bias, two statistics and a counter
    assert sizes == [4 * (numbers + head) + 8, 4 * numbers]
    assert file_bytes(plans[1].update) < 4 * numbers + 1000


def test_named_parameters_are_trained_next_to_the_adapters() -> None:
    plan = METHODS["fedsimclr"].bind(lora_spec("fedsimclr", trainable=["norm.*"])).plan
    sent = {each.name for each in plan.update if each.name.startswith("encoder.")}
    assert sent == ADAPTERS | {"encoder.norm.weight", "encoder.norm.bias"}


def test_flesd_refuses_adapters() -> None:
    values = method_spec("flesd").model_dump(mode="json")
    values["model"] |= {"encoder": {"name": "vit-tiny", "patch_size": 8}, "lora": {"rank": 1}}
    with pytest.raises(ValidationError, match=r"leave model\.trainable and model\.lora out"):
        RunSpec.model_validate(values)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("fedsimclr", {}),
        ("fedbyol", {}),
        ("fedmoco", {"queue_size": 24}),
        ("scaffold", {}),
        ("fedvicreg", {"add_ons": [{"name": "fedx"}]}),
        ("fedu2", {"reducer": {"name": "eua", "server_learning_rate": 0.3}}),
        ("ldawa", {}),
    ],
)
def test_only_adapters_of_the_encoder_change(name: str, method: dict[str, Any]) -> None:
    spec = lora_spec(name, method)
    first = start(spec)
    locals_ = [local_round(spec, first.received, client) for client in ("client-0", "client-1")]
    assert {key for key in locals_[0].update if key.startswith("encoder.")} == ADAPTERS
    second = aggregate(spec, first.state, [(local.num_examples, local.update) for local in locals_])
    encoder = [key for key in first.received if key.startswith("encoder.")]
    moved = {key for key in encoder if not torch.equal(first.received[key], second.received[key])}
    # The second factor starts from 0 and moves with the first step; the first factor moves with the second step.
    assert {key for key in ADAPTERS if key.endswith("lora_b")} <= moved <= ADAPTERS
    third = local_round(spec, second.received, "client-0", number=2, state=locals_[0].state)
    assert third.update.keys() == locals_[0].update.keys()


def test_a_run_ends_with_the_adapters_merged_into_the_encoder() -> None:
    spec = lora_spec("fedalignuniform").model_copy(update={"num_rounds": 1})
    result = simulate(spec, shards(spec))
    before, after = (load_encoder(tensors, spec).state_dict() for tensors in (result.initial, result.model))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"blocks.0.attn.qkv.weight", "blocks.0.attn.proj.weight"}
    assert result.history[0].bytes_up == 3 * file_bytes(METHODS["fedalignuniform"].bind(spec).plan.update)
