"""Commands for evaluations at the sites."""

import json

import pytest

from fedssl.protocol.site_work import SiteAnswer
from support.commands import Fedssl
from support.coordinator import Coordinator
from support.federation import tiny_spec
from support.site_counts import CROSS_SITE, counts, cross_counts, site_head, sites_spec

pytestmark = pytest.mark.integration


def test_results_of_each_site_the_worst_the_mean_and_the_pooled_are_shown(
    coordinator: Coordinator, fedssl: Fedssl
) -> None:
    workers = {name: coordinator.worker(name) for name in "abcd"}
    run = coordinator.client.create_run(sites_spec())
    assert "there are none" in fedssl("run", "site-evaluations", run.id).stderr
    coordinator.advance(run.id)
    for name, (right, wrong) in {"a": (3, 1), "b": (1, 3)}.items():
        item = workers[name].claim_site_evaluation()
        assert item is not None
        answer = SiteAnswer(evaluation_id=item.evaluation_id, round_number=0, counts=counts(right, wrong))
        workers[name].answer_site_evaluation(answer)
    item = workers["c"].claim_site_evaluation()
    assert item is not None
    refusal = SiteAnswer(evaluation_id=item.evaluation_id, round_number=0, refusal="the policy says no")
    workers["c"].answer_site_evaluation(refusal)
    shown = fedssl("run", "site-evaluations", run.id)
    assert shown.exit_code == 0, shown.output
    rows = [line.split() for line in shown.stdout.splitlines() if "%" in line]
    assert [row[:3] for row in rows[:2]] == [["a", "8", "75.00"], ["b", "8", "25.00"]]
    assert [" ".join(row).split(" %")[0] for row in rows[2:]] == [
        "worst site - 25.00",
        "mean - 50.00",
        "pooled - 50.00",
    ]
    assert "c has no result: the policy says no" in shown.stderr
    assert "d has no result: it has not answered yet" in shown.stderr
    document = fedssl("run", "site-evaluations", run.id, "--round", "0", "--format", "json")
    [view] = json.loads(document.stdout)
    assert view["worst"]["knn/accuracy"] == {"client_id": "b", "value": 0.25}
    missing = fedssl("run", "site-evaluations", run.id, "--round", "1")
    assert missing.exit_code != 0
    assert "the sites were not asked about round 1" in missing.output


def test_an_evaluation_at_the_sites_is_requested_by_a_command(coordinator: Coordinator, fedssl: Fedssl) -> None:
    worker = coordinator.worker("a")
    coordinator.worker("b")
    run = coordinator.client.create_run(sites_spec(every=0))
    coordinator.advance(run.id)
    assert worker.claim_site_evaluation() is None
    asked = fedssl("run", "evaluate", run.id, "--at", "sites", "--format", "json")
    assert asked.exit_code == 0, asked.output
    view = json.loads(asked.stdout)
    assert (view["round_number"], [site["state"] for site in view["sites"]]) == (0, ["offered", "offered"])
    item = worker.claim_site_evaluation()
    assert item is not None
    worker.answer_site_evaluation(SiteAnswer(evaluation_id=item.evaluation_id, round_number=0, counts=counts()))
    again = fedssl("run", "evaluate", run.id, "--at", "sites", "--round", "0")
    assert "75.00 %" in again.stdout
    assert "b has no result: it has not answered yet" in again.stderr
    for options, words in (
        (["--round", "1"], "is not closed yet"),
        (["--data", "x", "--num-test", "5"], "--at sites does not take --data and --num-test"),
        (["--wait"], "a site that is offline answers when it is back"),
    ):
        wrong = fedssl("run", "evaluate", run.id, "--at", "sites", *options)
        assert wrong.exit_code != 0
        assert words in wrong.stderr


def test_results_of_each_sites_classifier_at_the_other_sites_are_shown(
    coordinator: Coordinator, fedssl: Fedssl
) -> None:
    workers = {name: coordinator.worker(name) for name in "ab"}
    run = coordinator.client.create_run(tiny_spec(evaluation=CROSS_SITE, cohort={"min_clients": 2}))
    coordinator.advance(run.id)
    missing = fedssl("run", "cross-site", run.id)
    assert missing.exit_code != 0
    assert "has no classifiers of sites" in missing.output
    for name, right in (("a", 3), ("b", 1), ("b", 2)):
        item = workers[name].claim_site_evaluation()
        assert item is not None
        head = site_head() if item.head is None else None
        answer = {"evaluation_id": item.evaluation_id, "round_number": 0, "head": head}
        workers[name].answer_site_evaluation(SiteAnswer(counts=cross_counts(right, 4 - right), **answer))
    shown = fedssl("run", "cross-site", run.id)
    assert shown.exit_code == 0, shown.output
    rows = [line.split() for line in shown.stdout.splitlines() if "%" in line]
    assert rows == [["a", "75.00", "%", "50.00", "%"], ["b", "-", "25.00", "%"]]
    assert "a has no result for the classifier of b: it has not answered yet" in shown.stderr
    document = json.loads(fedssl("run", "cross-site", run.id, "--round", "0", "--format", "json").stdout)
    assert [(cell["head_of"], cell["client_id"], cell["state"]) for cell in document["cells"]] == [
        ("a", "b", "completed"),
        ("b", "a", "offered"),
    ]
