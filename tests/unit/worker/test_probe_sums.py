"""Sums over a site's labelled images leave only if its policy has a rule for them, and only if they cover enough
images."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedssl.artifacts.tensors import Tensors, save_tensors
from fedssl.data.site_labels import SiteLabels
from fedssl.engine import run_aggregation, start_run
from fedssl.methods import METHODS
from fedssl.methods.api import Context, Update
from fedssl.methods.objectives.ridge_probe import CROSS_ENTROPY, GRAM, HELD_OUT, MOMENT, PENALTIES, RIGHT, SOLUTIONS
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import Cause
from fedssl_worker.disclosure.egress import _numbers_of_images
from fedssl_worker.disclosure.policy import PolicyEnforcer, PolicyError
from fedssl_worker.labels import OwnLabels

from .conftest import CLIENT, WorkerHarness, make_item, make_spec, own_labels

RULE = ("[[allow]]", 'artifact = "probe-sums"', 'methods = ["ridge-probe"]')
WIDTH = 8  # of the encoder in make_spec
NUM_TRAINED = 22  # of the 32 images: one of each class's three or four is held out


def _spec(**method: Any) -> RunSpec:
    return make_spec({"name": "ridge-probe", **method})


def _work(harness: WorkerHarness, spec: RunSpec, policy: Path | None = None, broadcast: Tensors | None = None) -> None:
    harness.offer(spec, 1 if broadcast is None else 2, broadcast)
    harness.restart(policy, own_labels(harness.folder)).step()


def _declined(harness: WorkerHarness) -> str:
    assert "PUT artifact" not in harness.coordinator.calls
    assert harness.coordinator.submissions == []
    [declined] = harness.coordinator.declined
    assert declined.cause == Cause.CLIENT_DATA
    return declined.reason


def test_sums_and_then_counts_are_sent_and_recorded_in_the_ledger(harness: WorkerHarness) -> None:
    spec = _spec()
    policy = harness.write_policy(*RULE)
    _work(harness, spec, policy)
    sums = harness.sent()
    assert sums[GRAM].shape == (WIDTH + 1, WIDTH + 1)
    assert float(sums[GRAM][-1, -1]) == float(sums[MOMENT][-1].sum()) == NUM_TRAINED
    start = start_run(METHODS["ridge-probe"], Context(spec=spec, round_number=0))
    sent = [Update("hospital-a", 32, lambda: sums)]
    after = run_aggregation(METHODS["ridge-probe"], start.state, sent, Context(spec=spec, round_number=1))
    _work(harness, spec, policy, after.broadcast)
    counts = harness.sent()
    assert not counts[GRAM].any()
    assert not counts[MOMENT].any()
    assert int(counts[HELD_OUT]) == 32 - NUM_TRAINED
    assert len(counts[RIGHT]) == 10
    assert (counts[CROSS_ENTROPY] > 0).all()
    intents = [body for body in harness.ledger() if body["kind"] == "intent"]
    assert [intent["artifact"] for intent in intents] == [["probe-sums"]] * 2
    assert intents[0]["tensors"] == [
        "probe.cross_entropy",
        "probe.gram",
        "probe.held_out",
        "probe.moment",
        "probe.right",
    ]


def test_a_policy_denies_sums_by_default(harness: WorkerHarness) -> None:
    policy = harness.write_policy("[[allow]]", 'artifact = "weights"', 'methods = ["*"]')
    _work(harness, _spec(), policy)
    assert "no rule allows probe-sums of ridge-probe" in _declined(harness)
    assert "GET artifact" not in harness.coordinator.calls


def test_a_worker_without_labels_declines_before_anything_is_fetched(harness: WorkerHarness) -> None:
    harness.offer(_spec(), 1)
    harness.restart().step()
    assert _declined(harness) == "this site has no labels: its worker was started without --labels"
    assert "GET artifact" not in harness.coordinator.calls


def test_work_is_declined_without_file_names_if_the_labels_do_not_fit_the_classes(harness: WorkerHarness) -> None:
    _work(harness, _spec(classes=["cat", "dog"]))
    assert _declined(harness) == "this site's labels do not fit the run's classes: see its worker's log"


def test_sums_are_not_sent_if_the_policy_forbids_them_after_the_claim(harness: WorkerHarness) -> None:
    policy = harness.write_policy(*RULE)
    harness.offer(_spec(), 1)
    agent = harness.restart(policy, own_labels(harness.folder), reregister=lambda: CLIENT)
    harness.write_policy(*RULE, "max_bytes = 100")
    agent.step()
    assert "bytes of probe-sums, max_bytes allows 100" in _declined(harness)
    assert harness.kinds()[-1] == "refused"


@pytest.mark.parametrize(("rule", "leaves"), [("min_images = 22", True), ("min_images = 23", False)])
def test_a_policy_sets_the_minimum_number_of_images(harness: WorkerHarness, rule: str, *, leaves: bool) -> None:
    _work(harness, _spec(), harness.write_policy(*RULE, rule))
    if leaves:
        assert len(harness.coordinator.submissions) == 1
    else:
        assert "its sums are of 22 images, and min_images is 23" in _declined(harness)
        assert harness.kinds()[-1] == "refused"


def test_the_default_minimum_number_of_images_is_twice_the_width(harness: WorkerHarness) -> None:
    """A spec may ask for fewer, but the policy's default applies."""
    spec = make_spec(
        {"name": "ridge-probe", "min_images": 1},
        model={"encoder": {"name": "convnet", "widths": [4, 12]}},
    )
    _work(harness, spec, harness.write_policy(*RULE))
    assert "its sums are of 22 images, and min_images is 24" in _declined(harness)


def test_a_spec_may_require_more_images_than_the_policy(harness: WorkerHarness) -> None:
    _work(harness, _spec(min_images=30), harness.write_policy(*RULE, "min_images = 1"))
    assert "hospital-a has 22 labelled training images, and sums of fewer than 30 do not leave" in _declined(harness)


def test_corrected_labels_are_used_after_a_restart(harness: WorkerHarness) -> None:
    """An update that was computed from the earlier labels is not sent."""
    spec = _spec()
    first = own_labels(harness.folder)
    corrected = OwnLabels(
        SiteLabels(np.roll(first.labels.labels, 1), first.labels.class_names, first.labels.places), {}
    )
    item = harness.item(spec, 1)
    executor = harness.executor(first)
    finished = executor.execute(item, lambda progress: None)
    assert executor.execute(item, lambda progress: None).digest == finished.digest
    assert harness.executor(corrected).execute(item, lambda progress: None).digest != finished.digest


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (('artifact = "weights"', "min_images = 3"), "only a rule for probe-sums has min_images"),
        (('artifact = "probe-sums"', "min_images = 0"), "min_images"),
    ],
)
def test_rules_without_a_meaning_are_refused(harness: WorkerHarness, lines: tuple[str, ...], words: str) -> None:
    policy = harness.write_policy("[[allow]]", 'methods = ["*"]', *lines)
    with pytest.raises(PolicyError, match=words):
        PolicyEnforcer(policy, harness.coordinator.url)


def test_the_coordinator_receives_the_rule_and_its_minimum(harness: WorkerHarness) -> None:
    notice = PolicyEnforcer(harness.write_policy(*RULE, "min_images = 40"), harness.coordinator.url).notice
    assert notice is not None
    [rule] = notice.allow
    assert (rule.artifact, rule.min_images) == ("probe-sums", 40)
    others = PolicyEnforcer(harness.write_policy(*RULE), harness.coordinator.url).notice
    assert others is not None
    assert "min_images" not in others.model_dump_json()  # an older coordinator does not know this key


@pytest.mark.parametrize(("multi_label", "num_held_out"), [(False, 30), (True, 3)])
def test_an_image_of_several_classes_is_counted_once(tmp_path: Path, num_held_out: int, *, multi_label: bool) -> None:
    item = make_item(_spec(multi_label=multi_label), 2)
    tensors = {each.name: torch.zeros(each.shape) for each in item.plan.update}
    save_tensors({**tensors, HELD_OUT: torch.tensor(30.0)}, tmp_path / "update")
    assert _numbers_of_images(tmp_path / "update", item) == (None, num_held_out)


def _unequal(harness: WorkerHarness) -> OwnLabels:
    """Return labels for which a share of 3 % is one image."""
    found = own_labels(harness.folder)
    return OwnLabels(replace(found.labels, labels=(np.arange(32) >= 20).astype(np.int64)), {})


def test_counts_of_few_held_out_images_are_not_sent(harness: WorkerHarness) -> None:
    """The coordinator chooses the ten classifiers: each could reveal one number of a single image's representation."""
    first = start_run(METHODS["ridge-probe"], Context(spec=_spec(test_share=0.03), round_number=0))
    crafted = {**first.broadcast, PENALTIES: torch.ones(10, dtype=torch.float64)}
    crafted[SOLUTIONS] = torch.zeros_like(first.broadcast[SOLUTIONS])
    for place in range(WIDTH):
        crafted[SOLUTIONS][place, place, 0] = 1.0
    harness.offer(_spec(test_share=0.03), 2, crafted)
    harness.restart(harness.write_policy(*RULE), _unequal(harness)).step()
    assert "its counts are of 1 held-out images, and 10 is the fewest" in _declined(harness)
    assert harness.kinds()[-1] == "refused"
