"""Tests of what a policy refuses, given a spec and a plan. The worker and the coordinator decide alike."""

from typing import Any

import pytest

from fedssl.artifacts.permission import evaluation_rule, refusal
from fedssl.methods import METHODS
from fedssl.protocol.plan import ArtifactPlan, TensorSpec
from fedssl.protocol.policy import SITE_ARTIFACTS, PolicyNotice
from fedssl.protocol.runs import RunSpec
from support.methods import ALL_METHODS, method_spec


def notice(*rules: dict[str, Any], **more: Any) -> PolicyNotice:
    return PolicyNotice.model_validate({"digest": "0" * 64, "allow": rules, **more})


def rule(artifact: str = "weights", methods: tuple[str, ...] = ("*",), **more: Any) -> dict[str, Any]:
    return {"artifact": artifact, "methods": methods, **more}


def plan_of(spec: RunSpec) -> ArtifactPlan:
    return METHODS[spec.method.name].bind(spec).plan


@pytest.mark.parametrize("name", ALL_METHODS)
def test_every_kind_of_every_method_needs_a_rule(name: str) -> None:
    """With one rule fewer than the plan has kinds, the update is refused."""
    spec = method_spec(name)
    plan = plan_of(spec)
    public = {"datasets": ["digits"]} if spec.public_data else {}
    needed = {tensor.kind for tensor in plan.update}
    rules = {kind: rule(kind, (name,), **public) for kind in needed}
    assert refusal(notice(*rules.values()), spec, plan) is None
    for kind in needed:
        others = [other for other in rules.values() if other["artifact"] != kind]
        assert f"no rule allows {kind} of {name}" in (refusal(notice(*others), spec, plan) or "")


def test_patterns_name_methods_and_tensors() -> None:
    spec = method_spec("fedbyol")
    plan = plan_of(spec)
    allowed = [rule(methods=("fedbyol",)), rule(methods=("fed*",)), rule(methods=("fedsimclr", "fedbyo?"))]
    assert [refusal(notice(one), spec, plan) for one in allowed] == [None] * 3
    for methods in (("fedsimclr",), ("byol",), ("fedbyol?",)):
        assert "no rule allows weights" in (refusal(notice(rule(methods=methods)), spec, plan) or "")
    why = refusal(notice(rule(tensors=("encoder.*",))), spec, plan)
    assert why == "no rule for weights of fedbyol names these tensors (predictor.*: 8, projector.*: 8)"
    both = notice(rule(tensors=("encoder.*",)), rule(tensors=("projector.*", "predictor.*", "online*", "target*")))
    assert refusal(both, spec, plan) is None


def plan_with(*tensors: tuple[str, int]) -> ArtifactPlan:
    return ArtifactPlan(
        broadcast=(), update=tuple(TensorSpec(name=name, dtype="F32", shape=(size,)) for name, size in tensors)
    )


def test_max_bytes_limits_the_bytes_that_a_rule_covers() -> None:
    """Values have 4 bytes: 40 bytes in the encoder, 80 in the projector."""
    plan = plan_with(("encoder.w", 10), ("projector.w", 20))
    spec = method_spec("fedbyol")
    assert refusal(notice(rule(max_bytes=120)), spec, plan) is None
    assert "one update holds 120 bytes of weights, max_bytes allows 119" in (
        refusal(notice(rule(max_bytes=119)), spec, plan) or ""
    )
    apart = (rule(tensors=("encoder.*",), max_bytes=40), rule(tensors=("projector.*",), max_bytes=80))
    assert refusal(notice(*apart), spec, plan) is None
    tight = (rule(tensors=("encoder.*",), max_bytes=39), rule(tensors=("projector.*",), max_bytes=80))
    assert "40 bytes" in (refusal(notice(*tight), spec, plan) or "")


def test_max_rounds_limits_the_rounds_of_the_run_and_the_round_of_the_work() -> None:
    spec = method_spec("fedbyol", num_rounds=3)
    plan = plan_of(spec)
    assert refusal(notice(rule(max_rounds=3)), spec, plan, 3) is None
    assert "the run has 3 rounds, max_rounds allows 2" in (refusal(notice(rule(max_rounds=2)), spec, plan, 1) or "")
    # The coordinator announces few rounds and continues beyond them.
    assert "4 rounds" in (refusal(notice(rule(max_rounds=3)), spec, plan, 4) or "")


def test_public_images_are_allowed_by_name_and_uploaded_ones_by_digest() -> None:
    digest = "ab" * 32
    named = method_spec("flesd")
    sent = method_spec("flesd", public_data={**named.public_data.model_dump(), "digest": digest})  # type: ignore[union-attr]
    plan = plan_of(named)
    kind = plan.update[0].kind

    def answer(spec: RunSpec, *datasets: str) -> str | None:
        return refusal(notice(rule(kind, datasets=datasets)), spec, plan)

    assert answer(named, "digits") is None
    assert answer(named, "dig*", "x") is None
    assert "datasets does not list digits" in (answer(named) or "")
    assert answer(named, "cifar10") is not None
    assert answer(sent, f"sha256:{digest}") is None
    assert f"does not list sha256:{digest}" in (answer(sent, "digits") or "")
    assert answer(sent, "sha256:" + "0" * 64) is not None
    assert answer(sent, "*") is None  # this pattern deliberately allows everything


def test_requirements_that_cannot_be_met_are_refused() -> None:
    spec = method_spec("fedbyol")
    plan = plan_of(spec)
    why = refusal(notice(rule(secure="required")), spec, plan)
    assert "may leave only inside a secure aggregation, and the run sends it without masks" in (why or "")
    secure = method_spec("fedbyol", aggregation={"arithmetic": "fixed"}, secure_aggregation={"min_cohort": 3})
    assert refusal(notice(rule(secure="required")), secure, plan) is None
    # Another rule may allow the same tensors to leave without masks.
    assert refusal(notice(rule(secure="required"), rule()), spec, plan) is None
    why = refusal(notice(rule(), privacy="example"), spec, plan)
    assert "requires differential privacy (example), which this version does not have" in (why or "")


def test_centroids_sent_next_to_a_secure_sum_need_a_rule_that_allows_them_without_masks() -> None:
    spec = method_spec("orchestra", aggregation={"arithmetic": "fixed"}, secure_aggregation={"min_cohort": 3})
    networks, plan = rule("weights", secure="required"), plan_of(spec)
    assert {tensor.name for tensor in spec.sent_apart(plan)} == {"local_centroids"}
    for rules in ([networks], [networks, rule("centroids", secure="required")]):
        assert "centroids" in (refusal(notice(*rules), spec, plan) or "")
    allowed = notice(networks, rule("centroids"))
    assert refusal(allowed, spec, plan) is None
    assert allowed.keeps_num_images  # without masks, no update may leave
    plain = spec.model_copy(update={"secure_aggregation": None})
    assert "weights may leave only inside a secure aggregation" in (refusal(allowed, plain, plan) or "")


def test_the_number_of_images_is_kept_back_in_runs_that_send_nothing_else() -> None:
    """Even an update without tensors carries it, and a coordinator could ask for one at any time."""
    spec = method_spec("single")
    assert plan_of(spec).update == ()
    why = refusal(notice(rule("weights", secure="required")), spec, plan_of(spec))
    assert why == "the number of images may leave only inside a secure aggregation, and the run sends it without masks"
    assert refusal(notice(rule("weights")), spec, plan_of(spec)) is None


def test_an_evaluation_needs_its_own_rule() -> None:
    spec = method_spec("fedbyol")
    allowed = notice(rule(), rule("evaluation", ("fedbyol",), min_count=3))
    found, why = evaluation_rule(allowed, spec, 1)
    assert (found, why) == (allowed.allow[1], "")
    for denied in (notice(rule()), notice(rule("evaluation", ("fedsimclr",)))):
        assert evaluation_rule(denied, spec, 1) == (None, "no rule allows evaluation of fedbyol")
    secure = method_spec("fedbyol", aggregation={"arithmetic": "fixed"}, secure_aggregation={"min_cohort": 3})
    for artifact in SITE_ARTIFACTS:  # a secure round does not mask them
        _, why = evaluation_rule(notice(rule(artifact, secure="required")), secure, 1, artifact)
        assert why == f"{artifact} may leave only inside a secure aggregation, and the run sends it without masks"
    _, why = evaluation_rule(notice(rule("evaluation"), privacy="example"), spec, 1)
    assert "requires differential privacy" in why
