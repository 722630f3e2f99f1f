"""The policies in docs/privacy.md are valid and do what the page describes."""

import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from fedssl.artifacts.permission import permits_metric, refusal
from fedssl.methods import METHODS
from fedssl.protocol.plan import Kind
from fedssl.protocol.policy import PolicyNotice
from fedssl.protocol.runs import RunSpec
from fedssl_worker.disclosure.ledger import entries
from fedssl_worker.disclosure.policy import NOT_ENFORCED, Policy, read_policy
from support.methods import method_spec

PAGE = (Path(__file__).parents[2] / "docs/privacy.md").read_text()
POLICIES = re.findall(r"^```toml policy\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
SECURE, TWO_METHODS, SIMILARITIES, ENCODER_ALONE, EVERYTHING = POLICIES


def notice(text: str) -> PolicyNotice:
    return Policy.model_validate(tomllib.loads(text)).notice("0" * 64)


def answer(text: str, spec: RunSpec) -> str | None:
    return refusal(notice(text), spec, METHODS[spec.method.name].bind(spec).plan)


@pytest.mark.parametrize("text", POLICIES, ids=["secure", "two methods", "similarities", "encoder alone", "everything"])
def test_every_policy_of_the_page_is_valid(text: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    assert read_policy(path)[0].client == "hospital-a"
    told = notice(text)
    assert PolicyNotice.model_validate_json(told.model_dump_json()) == told  # as it is sent, stored and shown


def test_the_policy_for_two_methods_permits_only_their_weights() -> None:
    for name in ("fedbyol", "fedu"):
        assert answer(TWO_METHODS, method_spec(name)) is None
        assert answer(TWO_METHODS, method_spec(name, num_rounds=201)) is not None
    for name in ("fedsimclr", "flesd", "fedrlc"):
        assert answer(TWO_METHODS, method_spec(name)) is not None
    assert permits_metric(notice(TWO_METHODS), "fedbyol", "loss")
    assert not permits_metric(notice(TWO_METHODS), "fedbyol", "divergence")


def test_the_policy_for_similarities_permits_only_two_public_data_sets() -> None:
    spec = method_spec("flesd")
    named = {"num_images": 128, "split": "test"}
    assert answer(SIMILARITIES, method_spec("flesd", public_data={**named, "dataset": "cifar10"})) is None
    assert answer(SIMILARITIES, spec) is not None
    digest = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    sent = {**named, "dataset": "whatever", "digest": digest}
    assert answer(SIMILARITIES, method_spec("flesd", public_data=sent)) is None
    assert answer(SIMILARITIES, method_spec("flesd", public_data={**sent, "digest": "0" * 64})) is not None
    assert answer(SIMILARITIES, method_spec("fedsimclr")) is not None


def test_the_policy_for_the_encoder_refuses_a_projector() -> None:
    assert "projector.*" in (answer(ENCODER_ALONE, method_spec("fedsimclr")) or "")
    assert permits_metric(notice(ENCODER_ALONE), "fedbyol", "effective_rank")
    assert not permits_metric(notice(ENCODER_ALONE), "fedu", "effective_rank")


def test_policies_that_require_secure_aggregation_refuse_plain_runs() -> None:
    assert "secure aggregation" in (answer(EVERYTHING, method_spec("fedbyol")) or "")
    assert "secure aggregation" in (answer(SECURE, method_spec("fedbyol")) or "")
    secure = {"aggregation": {"arithmetic": "fixed"}, "secure_aggregation": {"min_cohort": 5}}
    assert answer(SECURE, method_spec("fedbyol", **secure)) is None


def test_the_page_lists_every_kind_and_key() -> None:
    for kind in (*get_args(Kind), "evaluation"):
        assert f"| `{kind}` |" in PAGE, kind
    for kind in get_args(entries.Kind):
        assert f"`{kind}`" in PAGE, kind
    document = tomllib.loads(EVERYTHING)
    fields = {field.alias or name for name, field in Policy.model_fields.items()}
    assert document.keys() == fields
    rule = Policy.model_fields["allow"].annotation
    (model, _) = get_args(rule)
    assert {key for each in document["allow"] for key in each} == set(model.model_fields)
    for section in ("secagg", "dp", "metrics", "ledger"):
        section_model = Policy.model_fields[section].annotation
        assert section_model is not None
        assert document[section].keys() == set(section_model.model_fields), section


@pytest.mark.parametrize("key", NOT_ENFORCED)
def test_the_page_lists_each_key_that_is_refused_because_it_is_not_enforced(key: str) -> None:
    assert f"`[{key}]`" in PAGE or f"`{key.rpartition('.')[2]}`" in PAGE
