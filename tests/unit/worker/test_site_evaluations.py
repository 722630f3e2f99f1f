"""A worker's evaluations on its own labelled images: what is sent, refused and recorded."""

import dataclasses
import itertools
import json
from collections import deque
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from fedssl.backoff import Backoff
from fedssl.client import Unavailable
from fedssl.errors import DataError
from fedssl.evaluation.site import SiteEvaluation
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.site_evaluation import SiteCounts
from fedssl.protocol.site_work import SiteEvaluationItem
from fedssl_worker.agent import Agent
from fedssl_worker.data import OwnImages
from fedssl_worker.disclosure.egress import Egress
from fedssl_worker.disclosure.ledger import LedgerEntry
from fedssl_worker.disclosure.ledger.totals import Totals
from fedssl_worker.disclosure.policy import NotPermitted, PolicyEnforcer, PolicyError
from fedssl_worker.executor import Executor
from fedssl_worker.labels import load_own_labels
from fedssl_worker.rescan import Rescan
from fedssl_worker.settings import Settings
from fedssl_worker.site_evaluations import SiteEvaluations

from .conftest import CPU, WorkerHarness, make_spec, own_labels, write_images
from .coordinator import Refusal

CLASSES = [str(number) for number in range(10)]
ALLOWED = ("[[allow]]", 'artifact = "evaluation"', 'methods = ["fedbyol"]')


def _spec(*measures: str, **sites: Any) -> RunSpec:
    sites = {"classes": CLASSES, "min_count": 1, "test_share": 0.5, **sites}
    return make_spec(evaluation={"at": "sites", "measures": measures or ("knn",), "sites": sites})


def _offer(harness: WorkerHarness, spec: RunSpec | None = None, **changes: Any) -> SiteEvaluationItem:
    work = harness.item(spec or _spec(), 1)
    shared = {
        name: getattr(work, name) for name in ("run_id", "client_id", "spec", "plan", "method_version", "broadcast")
    }
    item = SiteEvaluationItem(**{"evaluation_id": uuid4(), "round_number": 1, **shared, **changes})
    harness.coordinator.evaluations = deque([*(harness.coordinator.evaluations or ()), item])
    return item


def _evaluations(
    harness: WorkerHarness, policy: Path | None = None, *, labelled: bool = True, egress: Egress | None = None
) -> SiteEvaluations:
    labels = own_labels(harness.folder) if labelled else None
    backoff = Backoff(first=0.01, longest=0.05)
    executor = harness.executor()
    egress = egress or harness.egress(policy)
    return SiteEvaluations(harness.client, executor, egress, harness.images, labels, CPU, backoff)


def _refusal(harness: WorkerHarness) -> str:
    [answer] = harness.coordinator.site_answers
    assert answer.counts is None
    assert answer.refusal is not None
    return answer.refusal


def test_counts_are_sent_and_recorded_in_the_ledger(harness: WorkerHarness) -> None:
    item = _offer(harness)
    _evaluations(harness).answer_next()
    [answer] = harness.coordinator.site_answers
    counts = answer.counts
    assert counts is not None
    assert (answer.evaluation_id, counts.num_train + counts.num_test) == (item.evaluation_id, 32)
    intent, sent = [body for body in harness.ledger() if body["kind"] in ("intent", "sent")]
    assert intent["artifact"] == ["evaluation"]
    assert (intent["run"], intent["round"], intent["method"]) == (str(item.run_id), 1, "fedbyol")
    assert f"num_test={counts.num_test}" in intent["numbers"]
    assert intent["bytes"] == len(counts.model_dump_json()) == sent["sent_bytes"]
    assert sent["intent"] == intent["seq"]


def test_rescan_evaluates_the_current_images(harness: WorkerHarness) -> None:
    path = write_images(harness.folder / "own.npz")
    images, labels = OwnImages(str(path), CPU), own_labels(harness.folder)
    settings = Settings(coordinator="https://x", data=str(path), state=harness.folder / "state", labels="own")
    registered: list[int] = []
    rescan = Rescan(settings, images, labels, lambda: registered.append(len(images)))
    harness = dataclasses.replace(harness, images=images)
    evaluations = SiteEvaluations(
        harness.client, harness.executor(), harness.egress(), images, labels, CPU, Backoff(), rescan
    )
    write_images(path, 40)
    _offer(harness)
    evaluations.answer_next()
    [answer] = harness.coordinator.site_answers
    assert answer.counts is not None, answer.refusal
    assert (answer.counts.num_train + answer.counts.num_test, registered) == (40, [40])
    path.write_bytes(b"")  # unusable images lead to a refusal without names of this machine
    _offer(harness)
    evaluations.answer_next()
    assert "images have changed and cannot be used" in str(harness.coordinator.site_answers[1].refusal)


def test_a_worker_without_labels_refuses_before_anything_is_fetched(harness: WorkerHarness) -> None:
    _offer(harness)
    _evaluations(harness, labelled=False).answer_next()
    assert _refusal(harness) == "this site has no labels: its worker was started without --labels"
    assert "GET artifact" not in harness.coordinator.calls


def test_a_policy_denies_evaluations_by_default(harness: WorkerHarness) -> None:
    _offer(harness)
    policy = harness.write_policy("[[allow]]", 'artifact = "weights"', 'methods = ["*"]')
    _evaluations(harness, policy).answer_next()
    assert "does not permit this evaluation: no rule allows evaluation of fedbyol" in _refusal(harness)
    assert "GET artifact" not in harness.coordinator.calls
    [refused] = [body for body in harness.ledger() if body["kind"] == "refused"]
    assert refused["artifact"] == ["evaluation"]


def test_a_policy_requires_ten_images_per_class_by_default(harness: WorkerHarness) -> None:
    _offer(harness)
    _offer(harness)
    _evaluations(harness, harness.write_policy(*ALLOWED)).answer_next()
    assert "0 of the run's 10 classes have at least 10 training and 10 test images" in _refusal(harness)
    _evaluations(harness, harness.write_policy(*ALLOWED, "min_count = 2")).answer_next()
    counts = harness.coordinator.site_answers[1].counts
    assert counts is not None
    assert counts.min_count == 2


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ('secure = "required"', "may leave only inside a secure aggregation"),
        ("max_rounds = 2", "the run has 3 rounds, max_rounds allows 2"),
        ("max_bytes = 10", "max_bytes allows 10"),
    ],
)
def test_the_limits_of_a_rule_apply_to_evaluations(harness: WorkerHarness, rule: str, words: str) -> None:
    _offer(harness)
    _evaluations(harness, harness.write_policy(*ALLOWED, "min_count = 1", rule)).answer_next()
    assert words in _refusal(harness)
    assert "intent" not in harness.kinds()


def test_the_policy_notice_omits_rules_that_older_coordinators_do_not_know(harness: WorkerHarness) -> None:
    rules = [("[[allow]]", f'artifact = "{name}"', 'methods = ["*"]') for name in ("weights", "statistics")]
    policy = harness.write_policy(*itertools.chain(*rules), *ALLOWED, "min_count = 3")
    notice = PolicyEnforcer(policy, harness.coordinator.url).notice
    assert notice is not None
    assert [rule.artifact for rule in notice.allow] == ["weights"]
    assert "min_count" not in notice.model_dump_json()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            ('artifact = "weights"', "min_count = 3"),
            "only a rule for evaluation, .* or channel-sums has min_count",
        ),
        (('artifact = "evaluation"', 'tensors = ["knn"]'), "a rule for evaluation has no tensors"),
        (('artifact = "evaluation"', "min_count = 0"), "min_count"),
    ],
)
def test_rules_without_a_meaning_are_refused(harness: WorkerHarness, lines: tuple[str, ...], words: str) -> None:
    policy = harness.write_policy("[[allow]]", 'methods = ["*"]', *lines)
    with pytest.raises(PolicyError, match=words):
        PolicyEnforcer(policy, harness.coordinator.url)


def test_counts_are_not_sent_if_the_policy_has_become_stricter(harness: WorkerHarness) -> None:
    item = _offer(harness)
    _evaluations(harness).answer_next()
    [answer] = harness.coordinator.site_answers
    assert answer.counts is not None
    with pytest.raises(NotPermitted, match="the policy has changed: it counts classes with 10 images or more"):
        harness.egress(harness.write_policy(*ALLOWED)).send_counts(item, SiteEvaluation(answer.counts))
    assert harness.ledger()[-1]["kind"] == "refused"
    assert len(harness.coordinator.site_answers) == 1


def test_evaluations_do_not_count_as_updates(harness: WorkerHarness) -> None:
    policy = harness.write_policy("max_rounds_total = 1", "max_bytes_total = 1", *ALLOWED, "min_count = 1")
    for _ in range(2):
        _offer(harness)
        _evaluations(harness, policy).answer_next()
    assert [answer.refusal for answer in harness.coordinator.site_answers] == [None, None]
    assert harness.egress(policy)._ledger.totals().num_rounds == 0


def test_evaluations_are_limited_over_all_runs_and_restarts(harness: WorkerHarness) -> None:
    """Evaluations may hold out different images, so that their differences concern single images."""
    lines = (*ALLOWED, "min_count = 1", "[ledger]", "segment_entries = 3")
    policy = harness.write_policy("max_evaluations_total = 2", *lines)
    specs = [_spec(test_share=share) for share in (0.5, 0.25, 0.5, 0.75)]
    for spec in specs:  # of one run and round; the third repeats the first question
        # If nothing may leave, nothing is fetched, so the missing weights are not noticed.
        _offer(harness, spec, **({"broadcast": "0" * 64} if spec is specs[-1] else {}))
        _evaluations(harness, policy).answer_next()
    answers = harness.coordinator.site_answers
    assert [answer.refusal is None for answer in answers] == [True, True, True, False]
    assert answers[0].counts == answers[2].counts
    message = "permits 2 evaluations in all runs together (max_evaluations_total), and 2 have left: raise the limit"
    assert message in str(answers[-1].refusal)
    assert message in [body["reason"] for body in harness.ledger() if body["kind"] == "refused"][-1]
    sorted((harness.folder / "ledger").glob("0*.jsonl"))[1].unlink()  # the totals of the next file replace it
    _offer(harness, specs[-1])
    _evaluations(harness, policy).answer_next()
    assert "and 2 have left" in str(harness.coordinator.site_answers[-1].refusal)
    policy = harness.write_policy("max_evaluations_total = 3", *lines)
    _offer(harness, specs[-1])
    _evaluations(harness, policy).answer_next()
    assert harness.coordinator.site_answers[-1].refusal is None


def test_another_answer_to_the_same_question_counts_as_another_evaluation(harness: WorkerHarness) -> None:
    """After the site's images have changed, the differences concern single images."""
    policy = harness.write_policy("max_evaluations_total = 1", *ALLOWED, "min_count = 1")
    _offer(harness)
    _evaluations(harness, policy).answer_next()
    [answer] = harness.coordinator.site_answers
    assert answer.counts is not None
    egress, other = harness.egress(policy), answer.counts.model_copy(update={"num_train": answer.counts.num_train + 1})
    egress.send_counts(_offer(harness), SiteEvaluation(answer.counts))  # the same answer again
    with pytest.raises(NotPermitted, match="permits 1 evaluations in all runs together"):
        egress.send_counts(_offer(harness), SiteEvaluation(other))


def test_evaluations_are_refused_if_an_earlier_version_did_not_total_them() -> None:
    totals = Totals()
    totals.count(LedgerEntry({"seq": 9, "kind": "rotated", "rounds_total": 1, "bytes_total": 8}, "", "", ""))
    with pytest.raises(NotPermitted, match="earlier files of the ledger are missing"):
        totals.require_evaluation("0" * 64, 5, "question")
    assert totals.is_known  # the limits on updates still apply


def test_an_evaluation_is_refused_without_file_names_if_the_labels_do_not_fit(harness: WorkerHarness) -> None:
    _offer(harness, _spec(classes=["cat", "dog"]))
    _evaluations(harness).answer_next()
    assert _refusal(harness) == "this site's labels do not fit the run's classes: see its worker's log"
    assert str(harness.folder) not in json.dumps(harness.ledger())


def test_an_unexpected_error_reports_only_its_type(harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("/home/owner/images")

    monkeypatch.setattr(Executor, "weights_of", fail)
    _offer(harness)
    _evaluations(harness).answer_next()
    assert _refusal(harness) == "the worker failed unexpectedly (RuntimeError): see its log"


def test_an_evaluation_is_answered_once_the_coordinator_is_reachable_again(harness: WorkerHarness) -> None:
    item = _offer(harness)
    evaluations = _evaluations(harness)

    def down(call: str) -> None:
        if call == "site-evaluations":
            raise Refusal("unavailable", 503)

    harness.coordinator.before = down
    with pytest.raises(Unavailable):
        evaluations.answer_next()
    harness.coordinator.before = lambda call: None
    evaluations.answer_next()
    [answer] = harness.coordinator.site_answers
    assert answer.evaluation_id == item.evaluation_id


def test_an_evaluation_is_repeated_with_the_same_counts_after_a_lost_reply(harness: WorkerHarness) -> None:
    _offer(harness)
    counted: list[SiteCounts | None] = []
    for _ in range(2):
        _evaluations(harness).answer_next()
        counted.append(harness.coordinator.site_answers[-1].counts)
        _offer(harness)
    assert counted[0] == counted[1]


def test_an_evaluation_for_another_method_version_is_refused_with_the_reason(harness: WorkerHarness) -> None:
    _offer(harness, method_version=99)
    _evaluations(harness).answer_next()
    assert "the run needs fedbyol version 99" in _refusal(harness)


def test_an_evaluation_that_was_already_answered_is_skipped(harness: WorkerHarness) -> None:
    _offer(harness)
    evaluations = _evaluations(harness)
    harness.coordinator.before = lambda call: None
    served = harness.coordinator.evaluations
    assert served is not None

    def answered(call: str) -> None:
        if harness.coordinator.calls.count("site-evaluations") == 2:
            served.clear()

    harness.coordinator.before = answered
    evaluations.answer_next()
    assert harness.coordinator.site_answers == []
    evaluations.answer_next()  # nothing is left


def test_an_agent_evaluates_when_there_is_no_work(harness: WorkerHarness) -> None:
    _offer(harness)
    agent = harness.restart(evaluate=_evaluations(harness).answer_next)
    agent.step()  # only this claim's answer shows that the coordinator supports evaluations
    assert harness.coordinator.site_answers == []
    agent.step()
    assert len(harness.coordinator.site_answers) == 1
    agent.step()
    assert harness.coordinator.calls.count("site-evaluations") == 2  # one claim, one answer


def test_a_site_with_local_batch_norm_evaluates_before_the_training_that_replaces_it(harness: WorkerHarness) -> None:
    values = _spec().model_dump(mode="json")
    spec = RunSpec.model_validate(values | {"model": {**values["model"], "batch_norm": "local"}})
    egress = harness.egress()
    evaluations = _evaluations(harness, egress=egress)
    agent = Agent(
        harness.client,
        harness.executor(),
        egress,
        claim_seconds=0.1,
        evaluate=evaluations.answer_next,
    )
    harness.offer(spec, 1)
    agent.step()
    newest = harness.coordinator.last_accepted
    assert newest is not None
    harness.offer(spec, 2)
    _offer(harness, spec, last_accepted=newest)
    agent.step()
    [answer] = harness.coordinator.site_answers
    assert answer.counts is not None
    assert harness.coordinator.submissions[0].update == newest.update
    assert len(harness.coordinator.submissions) == 2
    _offer(harness, spec, last_accepted=newest.model_copy(update={"update": "0" * 64}))
    _offer(harness, spec)
    for _ in range(2):
        evaluations.answer_next()
    missing, untrained = (answer.refusal or "" for answer in harness.coordinator.site_answers[1:])
    assert "the client state of round 1 is missing" in missing
    assert "has not trained up to round 1" in untrained


def test_a_worker_detects_from_each_claim_if_the_coordinator_has_evaluations(harness: WorkerHarness) -> None:
    _offer(harness)
    for has_evaluations in (False, True):
        assert harness.client.claim(0) is None
        assert harness.client.has_site_evaluations is has_evaluations
    harness.coordinator.evaluations = None  # another process of the coordinator, of the previous version
    assert harness.client.claim(0) is None
    assert not harness.client.has_site_evaluations


def test_labels_of_another_number_of_images_are_refused(tmp_path: Path) -> None:
    data = str(write_images(tmp_path / "own.npz"))
    with pytest.raises(DataError, match=r"has labels of 32 images, and .* has 31: correct the labels"):
        load_own_labels(data, "own", None, 31)
    with pytest.raises(DataError, match="--label-names renames classes of --labels: give both"):
        load_own_labels(data, None, tmp_path / "names.csv", 32)
    assert load_own_labels(data, None, None, 32) is None


def test_a_classifier_of_this_site_leaves_only_if_the_policy_allows_it(harness: WorkerHarness) -> None:
    spec = _spec("probe", cross_site="probe")
    for _ in range(3):
        _offer(harness, spec)
    _evaluations(harness).answer_next()
    allowed = (*ALLOWED, "min_count = 1")
    _evaluations(harness, harness.write_policy(*allowed)).answer_next()
    rule = ("[[allow]]", 'artifact = "site-head"', 'methods = ["fedbyol"]')
    _evaluations(harness, harness.write_policy(*allowed, *rule, "max_bytes = 40")).answer_next()
    free, denied, limited = harness.coordinator.site_answers
    assert free.head is not None
    assert free.counts is not None
    assert free.head.classes == free.counts.classes
    assert free.counts == denied.counts == limited.counts
    assert denied.head is limited.head is None
    assert "does not permit this site-head: no rule allows site-head of fedbyol" in (denied.no_head or "")
    assert "max_bytes allows 40" in (limited.no_head or "")
    entries = [body for body in harness.ledger() if body["kind"] in ("intent", "sent", "refused")]
    assert [(body["kind"], body.get("artifact")) for body in entries if body["kind"] != "sent"] == [
        ("intent", ["evaluation", "site-head"]),
        ("refused", ["site-head"]),
        ("intent", ["evaluation"]),
        ("refused", ["site-head"]),
        ("intent", ["evaluation"]),
    ]
    content = [len(each.model_dump_json()) for each in (free.counts, free.head)]
    assert entries[0]["bytes"] == entries[1]["sent_bytes"] == sum(content)


def test_a_classifier_of_another_site_is_counted_only_if_the_policy_allows_that(harness: WorkerHarness) -> None:
    spec = _spec("probe", cross_site="probe")
    _offer(harness, spec)
    _evaluations(harness).answer_next()
    [own] = harness.coordinator.site_answers
    for _ in range(2):
        _offer(harness, spec, head=own.head, head_of="other")
    rule = ("[[allow]]", 'artifact = "cross-evaluation"', 'methods = ["fedbyol"]', "min_count = 1")
    _evaluations(harness, harness.write_policy(*ALLOWED)).answer_next()
    _evaluations(harness, harness.write_policy(*ALLOWED, *rule)).answer_next()
    _, denied, counted = harness.coordinator.site_answers
    assert "does not permit this cross-evaluation: no rule allows" in (denied.refusal or "")
    assert (counted.head, counted.no_head) == (None, None)
    assert own.counts is not None
    assert counted.counts is not None
    assert counted.counts.measures == {"probe": own.counts.measures["probe"]}
    intent = [body for body in harness.ledger() if body["kind"] == "intent"][-1]
    assert (intent["artifact"], intent["head_of"]) == (["cross-evaluation"], "other")
