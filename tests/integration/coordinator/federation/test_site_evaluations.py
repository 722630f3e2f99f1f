"""Evaluations at the sites: offered to every client of a run, answered once, and refused if they cannot be right."""

import json
import time
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from fedssl.client import Conflict, NotFound, Rejected, WorkerClient
from fedssl.protocol.evaluation import JudgingConfig
from fedssl.protocol.policy import AllowRule, PolicyNotice
from fedssl.protocol.site_work import ANSWER_BYTES, SiteAnswer, SiteEvaluationItem
from fedssl.protocol.states import SiteEvaluationState
from fedssl.protocol.work import AcceptedUpdate
from support.coordinator import Coordinator
from support.federation import deliver, tiny_spec
from support.site_counts import CROSS_SITE, counts, counts_json, cross_counts, site_head, sites_spec
from support.tables import ChangeWatcher, Tables

SUBMIT = "/v1/work/site-evaluations/submit"


@pytest.fixture
def change_watcher(coordinator: Coordinator, tables: Tables) -> ChangeWatcher:
    return ChangeWatcher(tables, coordinator.store)


def _prepared(coordinator: Coordinator, **changes: Any) -> tuple[UUID, dict[str, WorkerClient]]:
    workers = {name: coordinator.worker(name) for name in "ab"}
    run = coordinator.client.create_run(sites_spec(**changes))
    coordinator.advance(run.id)
    return run.id, workers


def _claimed(worker: WorkerClient) -> SiteEvaluationItem:
    item = worker.claim_site_evaluation()
    assert item is not None
    return item


def _finish(coordinator: Coordinator, run_id: UUID, workers: dict[str, WorkerClient], folder: Path) -> None:
    """Train all rounds of a run."""
    while coordinator.client.run(run_id).outcome is None:
        for worker in workers.values():
            work = worker.claim(0)
            assert work is not None
            deliver(worker, work, folder, value=float(work.round_number))
        coordinator.advance(run_id)


def _answer(item: SiteEvaluationItem, right: int = 3, wrong: int = 1, **changes: Any) -> SiteAnswer:
    own = counts(right, wrong, **changes)
    return SiteAnswer(evaluation_id=item.evaluation_id, round_number=item.round_number, counts=own)


def _refusal(item: SiteEvaluationItem, reason: str = "no labels") -> SiteAnswer:
    return SiteAnswer(evaluation_id=item.evaluation_id, round_number=item.round_number, refusal=reason)


def test_each_client_is_asked_before_training_and_after_each_round(coordinator: Coordinator, tmp_path: Path) -> None:
    coordinator.worker("c")  # also registered, so it is asked too
    run_id, workers = _prepared(coordinator, num_rounds=1)
    before = {name: _claimed(worker) for name, worker in workers.items()}
    assert {item.round_number for item in before.values()} == {0}
    assert {name: item.client_id for name, item in before.items()} == {"a": "a", "b": "b"}
    for name, worker in workers.items():
        assert _claimed(worker) == before[name]  # the same evaluation until it is answered
        worker.answer_site_evaluation(_answer(before[name]))
        assert worker.claim_site_evaluation() is None
    for worker in [*workers.values(), coordinator.worker("c")]:
        if (work := worker.claim(0)) is not None:
            deliver(worker, work, tmp_path)
    coordinator.advance(run_id)
    after = _claimed(workers["a"])
    assert after.round_number == 1
    assert after.broadcast == coordinator.client.run(run_id).model != before["a"].broadcast
    workers["a"].download(after.broadcast, tmp_path / "weights")  # no round broadcasts the last weights
    workers["a"].answer_site_evaluation(_answer(after))
    for worker in (workers["a"], coordinator.worker("d")):  # it has answered; it is not asked
        with pytest.raises(NotFound):
            worker.download(after.broadcast, tmp_path / "again")
    views = list(coordinator.client.site_evaluations(run_id))
    assert [(view.round_number, [site.client_id for site in view.sites]) for view in views] == [
        (0, ["a", "b", "c"]),
        (1, ["a", "b", "c"]),
    ]


def test_sites_with_their_own_norms_are_sent_the_update_that_their_state_belongs_to(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    model = tiny_spec().model.model_dump(mode="json")
    run_id, workers = _prepared(coordinator, num_rounds=2, model={**model, "batch_norm": "local"})
    first = {name: _claimed(worker) for name, worker in workers.items()}
    assert {item.last_accepted for item in first.values()} == {None}
    workers["a"].answer_site_evaluation(_answer(first["a"]))
    _finish(coordinator, run_id, workers, tmp_path)
    updates = {
        view.number: {each.client_id: each.update for each in view.assignments}
        for view in coordinator.client.rounds(run_id)
    }
    for number in (1, 2):  # after both rounds: the update of the evaluated round, not the newest one
        item = _claimed(workers["a"])
        assert item.last_accepted == AcceptedUpdate(round_number=number, update=updates[number]["a"] or "")
        workers["a"].answer_site_evaluation(_answer(item))
    with pytest.raises(Conflict, match="only the sites can evaluate it"):
        coordinator.client.request_evaluation(run_id, JudgingConfig(dataset="digits"), 2)
    with pytest.raises(Rejected, match="keeps its own BatchNorm, which a start would lack: continue that run"):
        coordinator.client.create_run(tiny_spec(model={**model, "initial": {"run": str(run_id)}}))


def test_results_are_shown_per_site_pooled_and_for_the_worst_site(coordinator: Coordinator) -> None:
    run_id, workers = _prepared(coordinator)
    for name, (right, wrong) in {"a": (3, 1), "b": (1, 3)}.items():
        workers[name].answer_site_evaluation(_answer(_claimed(workers[name]), right, wrong))
    [view] = coordinator.client.site_evaluations(run_id)
    assert {site.client_id: (site.state, (site.results or {})["knn/accuracy"]) for site in view.sites} == {
        "a": ("completed", 0.75),
        "b": ("completed", 0.25),
    }
    assert (view.mean["knn/accuracy"], view.pooled["knn/accuracy"]) == (0.5, 0.5)
    assert (view.worst["knn/accuracy"].client_id, view.worst["knn/accuracy"].value) == ("b", 0.25)
    assert [site.num_test for site in view.sites] == [8, 8]


def test_an_offline_site_and_a_refusal_do_not_delay_the_run(coordinator: Coordinator, tmp_path: Path) -> None:
    run_id, workers = _prepared(coordinator, num_rounds=1)
    reply = workers["a"].answer_site_evaluation(_refusal(_claimed(workers["a"]), "the policy says no"))
    assert reply.state == SiteEvaluationState.REFUSED
    for worker in workers.values():
        work = worker.claim(0)
        assert work is not None
        deliver(worker, work, tmp_path)
    coordinator.advance(run_id)
    assert coordinator.client.run(run_id).outcome == "completed"
    first, _ = coordinator.client.site_evaluations(run_id)
    assert [(site.state, site.reason, site.results) for site in first.sites] == [
        ("refused", "the policy says no", None),
        ("offered", None, None),
    ]
    assert (first.mean, first.pooled, first.worst) == ({}, {}, {})


def test_the_first_answer_stays_and_repeating_it_gets_the_same_reply(
    coordinator: Coordinator, change_watcher: ChangeWatcher
) -> None:
    _, workers = _prepared(coordinator)
    item = _claimed(workers["a"])
    reply = workers["a"].answer_site_evaluation(_answer(item))
    assert workers["a"].answer_site_evaluation(_answer(item)) == reply
    for other in (_answer(item, 4, 0), _refusal(item)):
        with (
            change_watcher.nothing_changes() as events,
            pytest.raises(Conflict, match="already completed and stays so"),
        ):
            workers["a"].answer_site_evaluation(other)
        assert [event.kind for event in events] == ["site_evaluation.answer_refused"]
    refused = _claimed(workers["b"])
    reply = workers["b"].answer_site_evaluation(_refusal(refused))
    assert workers["b"].answer_site_evaluation(_refusal(refused)) == reply
    with pytest.raises(Conflict, match="already refused"):
        workers["b"].answer_site_evaluation(_answer(refused))


def test_the_evaluation_of_another_client_is_answered_like_an_unknown_one(
    coordinator: Coordinator, change_watcher: ChangeWatcher
) -> None:
    _, workers = _prepared(coordinator)
    item = _claimed(workers["a"])
    unknown = _answer(item).model_copy(update={"evaluation_id": uuid4()})
    for answer in (_answer(item), unknown):
        with change_watcher.nothing_changes() as events, pytest.raises(NotFound, match="b has no evaluation"):
            workers["b"].answer_site_evaluation(answer)
        assert [(event.kind, event.client_id) for event in events] == [("site_evaluation.foreign", "b")]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "more images than registered": ({"num_train": 993}, "a counts 1001 images, and registered 1000"),
    "an unknown class": ({"classes": [0, 2]}, "there is a class 2, but the run has 2"),
    "a lower min_count": ({"min_count": 1}, "min_count is 1, and the run's is 2"),
    "tables that differ": ({"num_test": 9}, "do not count the same 9 images"),
}


@pytest.mark.parametrize("name", WRONG)
def test_impossible_counts_are_refused(coordinator: Coordinator, change_watcher: ChangeWatcher, name: str) -> None:
    changes, words = WRONG[name]
    _, workers = _prepared(coordinator)
    item = _claimed(workers["a"])
    with change_watcher.nothing_changes() as events, pytest.raises(Rejected, match=words):
        workers["a"].answer_site_evaluation(_answer(item, **changes))
    [event] = events
    assert (event.kind, event.client_id, event.round_number) == ("site_evaluation.answer_refused", "a", 0)
    workers["a"].answer_site_evaluation(_answer(item))  # it may still be answered


def test_a_client_that_keeps_its_number_of_images_may_not_send_counts(
    coordinator: Coordinator, change_watcher: ChangeWatcher
) -> None:
    """Its counts once had no limit, so 10^12 images could determine the pooled results."""
    _, workers = _prepared(coordinator)
    item = _claimed(workers["a"])
    rule = AllowRule(artifact="weights", methods=("*",), secure="required")
    coordinator.worker("a", policy=PolicyNotice(digest="0" * 64, allow=(rule,)))
    with (
        change_watcher.nothing_changes() as events,
        pytest.raises(Rejected, match=r"a counts \d+ images, and keeps their number"),
    ):
        workers["a"].answer_site_evaluation(_answer(item, num_train=10**9))
    assert [event.kind for event in events] == ["site_evaluation.answer_refused"]


def test_an_answer_about_another_round_is_refused(coordinator: Coordinator, change_watcher: ChangeWatcher) -> None:
    _, workers = _prepared(coordinator)
    answer = _answer(_claimed(workers["a"])).model_copy(update={"round_number": 1})
    with (
        change_watcher.nothing_changes() as events,
        pytest.raises(Rejected, match="is of round 0, and this answer of"),
    ):
        workers["a"].answer_site_evaluation(answer)
    assert [event.kind for event in events] == ["site_evaluation.answer_refused"]


_NOT_WHOLE = [
    '{"knn": {"confusion": [[NaN, 1], [1, 3]], "positives": [[4], [4]], "negatives": [[4], [4]]}}',
    '{"knn": {"confusion": [[-3, 1], [1, 3]], "positives": [[4], [4]], "negatives": [[4], [4]]}}',
    '{"knn": {"confusion": [[1e400, 1], [1, 3]], "positives": [[4], [4]], "negatives": [[4], [4]]}}',
    '{"knn": {"confusion": [[2.5, 1], [1, 3]], "positives": [[4], [4]], "negatives": [[4], [4]]}}',
    '{"guess": {"confusion": [], "positives": [], "negatives": []}}',
    "[]",
]


def test_counts_that_are_not_whole_numbers_are_refused(coordinator: Coordinator, change_watcher: ChangeWatcher) -> None:
    _, _ = _prepared(coordinator)
    token = coordinator.worker_token("a")
    item = WorkerClient(coordinator.url, token).claim_site_evaluation()
    assert item is not None
    for measures in _NOT_WHOLE:
        own = json.dumps(counts_json(measures=0)).replace('"measures": 0', f'"measures": {measures}')
        body = f'{{"evaluation_id": "{item.evaluation_id}", "round_number": 0, "counts": {own}}}'
        with coordinator.http(token) as http, change_watcher.nothing_changes() as events:
            reply = http.post(SUBMIT, content=body, headers={"Content-Type": "application/json"})
        assert reply.status_code == 422, measures
        assert [event.kind for event in events] == ["request.refused"], measures


def test_an_answer_is_limited_to_a_mebibyte(coordinator: Coordinator) -> None:
    _prepared(coordinator)
    with coordinator.http(coordinator.worker_token("a")) as http:
        small, large = (http.post(SUBMIT, content=b" " * size) for size in (ANSWER_BYTES, ANSWER_BYTES + 1))
    assert (small.status_code, large.status_code) == (422, 413)


def test_only_workers_claim_and_answer_evaluations(coordinator: Coordinator) -> None:
    with coordinator.http() as http:
        assert http.post(SUBMIT, json={}).status_code == 403
        assert http.post("/v1/work/site-evaluations/claim").status_code == 403


def test_a_claim_returns_at_once_for_an_evaluation_if_the_worker_asks_for_that(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    """The first claim does not ask, because an older coordinator would refuse it. So it waits for its full time."""
    _, workers = _prepared(coordinator, num_rounds=1)
    worker = workers["a"]
    work = worker.claim(0)
    assert work is not None
    assert not worker.has_site_evaluations  # training comes first
    deliver(worker, work, tmp_path)
    begin = time.monotonic()
    assert worker.claim(20) is None
    assert time.monotonic() - begin < 10
    assert worker.has_site_evaluations
    worker.answer_site_evaluation(_answer(_claimed(worker)))
    assert worker.claim(0) is None
    assert not worker.has_site_evaluations


def test_revoking_a_client_expires_its_offered_evaluations(coordinator: Coordinator) -> None:
    run_id, workers = _prepared(coordinator)
    workers["b"].answer_site_evaluation(_answer(_claimed(workers["b"])))
    for name in "ab":
        coordinator.client.revoke_client(name)
    [view] = coordinator.client.site_evaluations(run_id)
    assert [(site.state, site.reason) for site in view.sites] == [
        ("expired", "the client was revoked"),
        ("completed", None),
    ]


def test_an_evaluation_expires_with_its_weights(coordinator: Coordinator, tables: Tables) -> None:
    run_id, workers = _prepared(coordinator)
    tables.execute("UPDATE artifacts SET collected_at = now() WHERE digest IN (SELECT model FROM site_evaluations)")
    assert workers["a"].claim_site_evaluation() is None
    [view] = coordinator.client.site_evaluations(run_id)
    assert (view.sites[0].state, view.sites[0].reason) == (
        "expired",
        "the weights were removed before this site answered",
    )


def test_weights_for_a_site_evaluation_are_kept_for_a_month(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    """The weights of round 1 are neither the first nor the last, so nothing else needs them after a month."""
    from fedssl_coordinator.storage.retention import collection

    run_id, workers = _prepared(coordinator, num_rounds=2)
    _finish(coordinator, run_id, workers, tmp_path)
    workers["a"].answer_site_evaluation(_answer(_claimed(workers["a"])))
    item = _claimed(workers["a"])
    assert item.round_number == 1
    month = "interval '31 days'"
    tables.execute(f"UPDATE rounds SET closed_at = closed_at - {month}")  # type: ignore[arg-type]
    tables.execute(f"UPDATE artifacts SET touched_at = touched_at - {month}")  # type: ignore[arg-type]
    collection.collect()
    workers["a"].download(item.broadcast, tmp_path / "weights")
    tables.execute(f"UPDATE site_evaluations SET created_at = created_at - {month}")  # type: ignore[arg-type]
    collection.collect()
    following = _claimed(workers["a"])
    assert following.round_number == 2
    assert [site.state for site in list(coordinator.client.site_evaluations(run_id))[1].sites] == ["expired", "offered"]


def test_deleting_a_run_deletes_its_evaluations(coordinator: Coordinator, tables: Tables) -> None:
    run_id, workers = _prepared(coordinator)
    item = _claimed(workers["a"])
    coordinator.client.stop(run_id)
    coordinator.client.delete_run(run_id)
    assert tables.query("SELECT count(*) FROM site_evaluations") == [(0,)]
    with pytest.raises(NotFound):
        workers["a"].answer_site_evaluation(_answer(item))


def test_the_rounds_are_listed_in_pages(coordinator: Coordinator, tmp_path: Path) -> None:
    run_id, workers = _prepared(coordinator, num_rounds=2)
    _finish(coordinator, run_id, workers, tmp_path)
    path = f"/v1/runs/{run_id}/site-evaluations"
    with coordinator.http() as http:
        first = http.get(path, params={"limit": 2}).json()
        rest = http.get(path, params={"limit": 2, "cursor": first["next_cursor"]}).json()
        assert http.get(f"/v1/runs/{uuid4()}/site-evaluations").status_code == 404
    assert [view["round_number"] for view in first["items"] + rest["items"]] == [0, 1, 2]
    assert rest["next_cursor"] is None


def test_a_request_asks_the_sites_about_the_newest_round_or_a_named_one(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    run_id, workers = _prepared(coordinator, num_rounds=2, every=0)
    _finish(coordinator, run_id, workers, tmp_path)
    assert [view.round_number for view in coordinator.client.site_evaluations(run_id)] == [2]
    path = f"/v1/runs/{run_id}/site-evaluations"
    with coordinator.http() as http:
        replies = [http.post(path, json=body) for body in ({}, {"round_number": 1}, {"round_number": 1})]
    assert [reply.status_code for reply in replies] == [200, 201, 200]  # the spec asks about the last round
    assert [reply.json()["round_number"] for reply in replies] == [2, 1, 1]
    assert [site["state"] for site in replies[1].json()["sites"]] == ["offered", "offered"]
    items = {}
    for _ in range(2):
        item = _claimed(workers["a"])
        workers["a"].answer_site_evaluation(_answer(item))
        items[item.round_number] = item.broadcast
    assert items.keys() == {1, 2}
    assert items[1] != items[2]
    kinds = [event.kind for event in coordinator.client.event_log(run_id)]
    assert kinds.count("site_evaluations.offered") == 2


def test_a_second_request_asks_only_sites_without_counts(coordinator: Coordinator, tables: Tables) -> None:
    coordinator.worker("c")
    run_id, workers = _prepared(coordinator)
    tables.execute(
        "UPDATE site_evaluations SET state = 'expired', reason = 'why', ended_at = now() WHERE client_id = 'c'"
    )
    workers["a"].answer_site_evaluation(_answer(_claimed(workers["a"])))
    refused = _claimed(workers["b"])
    workers["b"].answer_site_evaluation(_refusal(refused))
    assert workers["b"].claim_site_evaluation() is None
    view = coordinator.client.request_site_evaluations(run_id)
    assert [(site.client_id, site.state, site.reason) for site in view.sites] == [
        ("a", "completed", None),
        ("b", "offered", None),
        ("c", "offered", None),
    ]
    assert _claimed(workers["b"]) == refused
    workers["b"].answer_site_evaluation(_answer(refused))
    assert coordinator.client.request_site_evaluations(run_id).sites[1].state == "completed"
    again = [event.client_id for event in coordinator.client.event_log(run_id, "site_evaluation.offered")]
    assert sorted(again) == ["b", "c"]


def test_a_request_reaches_a_client_that_has_registered_since(coordinator: Coordinator) -> None:
    run_id, _ = _prepared(coordinator)
    late = coordinator.worker("late")
    assert late.claim_site_evaluation() is None
    view = coordinator.client.request_site_evaluations(run_id, 0)
    assert [site.client_id for site in view.sites] == ["a", "b", "late"]
    assert _claimed(late).round_number == 0


def test_an_impossible_request_changes_nothing(
    coordinator: Coordinator, change_watcher: ChangeWatcher, tables: Tables, tmp_path: Path
) -> None:
    run_id, workers = _prepared(coordinator, num_rounds=1)
    plain = coordinator.client.create_run(tiny_spec(cohort={"min_clients": 2})).id
    coordinator.advance(plain)
    waiting = coordinator.client.create_run(sites_spec()).id  # has no weights yet
    _finish(coordinator, run_id, workers, tmp_path)
    for run, number, words in (
        (run_id, 2, f"round 2 of run {run_id} is not closed yet"),
        (waiting, None, f"round 0 of run {waiting} is not closed yet"),
        (plain, None, "has no evaluation at the sites: that needs evaluation.at"),
    ):
        with change_watcher.nothing_changes(), pytest.raises(Conflict, match=words):
            coordinator.client.request_site_evaluations(run, number)
    with change_watcher.nothing_changes(), pytest.raises(NotFound):
        coordinator.client.request_site_evaluations(uuid4())
    tables.execute("UPDATE artifacts SET collected_at = now() WHERE digest IN (SELECT broadcast FROM runs)")
    with change_watcher.nothing_changes(), pytest.raises(Conflict, match="the weights of round 1 were removed"):
        coordinator.client.request_site_evaluations(run_id)


def test_a_request_without_any_registered_client_is_refused(coordinator: Coordinator) -> None:
    run_id, _ = _prepared(coordinator)
    for name in "ab":
        coordinator.client.revoke_client(name)
    with pytest.raises(Conflict, match="there is no site to ask"):
        coordinator.client.request_site_evaluations(run_id)


def _cross(item: SiteEvaluationItem, right: int = 3, wrong: int = 1, **more: Any) -> SiteAnswer:
    own = {"evaluation_id": item.evaluation_id, "round_number": item.round_number, **more}
    return SiteAnswer(counts=cross_counts(right, wrong), **own)


def test_each_sites_classifier_is_sent_to_the_other_sites_that_have_counts(
    coordinator: Coordinator, tables: Tables
) -> None:
    """There are four sites: b's policy keeps its classifier, c has no labels, and d is offline."""
    workers = {name: coordinator.worker(name) for name in "abcd"}
    run_id = coordinator.client.create_run(tiny_spec(evaluation=CROSS_SITE, cohort={"min_clients": 2})).id
    coordinator.advance(run_id)
    with pytest.raises(NotFound, match="has no classifiers of sites"):
        coordinator.client.cross_site(run_id)
    first, head = _claimed(workers["a"]), site_head()
    answer = _cross(first, head=head)
    reply = workers["a"].answer_site_evaluation(answer)
    assert workers["a"].claim_site_evaluation() is None  # no other site has counts yet
    workers["c"].answer_site_evaluation(_refusal(_claimed(workers["c"])))
    workers["b"].answer_site_evaluation(_cross(_claimed(workers["b"]), 2, 2, no_head="the policy says no"))
    assert workers["a"].answer_site_evaluation(answer) == reply
    with pytest.raises(Conflict, match="already completed"):
        workers["a"].answer_site_evaluation(answer.model_copy(update={"head": site_head((0.0,) * 6)}))
    assert workers["a"].claim_site_evaluation() is workers["c"].claim_site_evaluation() is None
    offered = _claimed(workers["b"])
    assert (offered.head, offered.head_of, offered.broadcast) == (head, "a", first.broadcast)
    [view] = coordinator.client.site_evaluations(run_id)
    assert [(site.client_id, site.state, site.reason) for site in view.sites] == [
        ("a", "completed", None),
        ("b", "completed", "no classifier for the other sites: the policy says no"),
        ("c", "refused", "no labels"),
        ("d", "offered", None),
    ]
    with pytest.raises(Rejected, match="the measures are knn, and the run's are probe"):
        workers["b"].answer_site_evaluation(_answer(offered))
    with pytest.raises(Rejected, match="this evaluation asks for no classifier"):
        workers["b"].answer_site_evaluation(_cross(offered, head=head))
    workers["b"].answer_site_evaluation(_cross(offered, 1, 3))
    workers["d"].answer_site_evaluation(_cross(_claimed(workers["d"]), head=head))
    workers["d"].answer_site_evaluation(_refusal(_claimed(workers["d"]), "no common class"))
    table = coordinator.client.cross_site(run_id, 0)
    assert coordinator.client.cross_site(run_id) == table
    shown = {(cell.head_of, cell.client_id): (cell.state, cell.reason) for cell in table.cells}
    assert shown == {
        ("a", "b"): ("completed", None),
        ("a", "d"): ("refused", "no common class"),
        ("d", "a"): ("offered", None),
        ("d", "b"): ("offered", None),
    }
    assert [cell.results["probe/accuracy"] for cell in table.cells if cell.results] == [0.25]
    assert {name: results["probe/accuracy"] for name, results in table.own.items()} == {"a": 0.75, "b": 0.5, "d": 0.75}
    coordinator.client.request_site_evaluations(run_id, 0)  # asks c again, and d about the classifier of a
    assert _claimed(workers["d"]).head_of == "a"
    assert tables.query("SELECT count(*) FROM site_evaluations WHERE run_id = %s", run_id) == [(8,)]


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ({"classes": [0]}, "its classifier is of the classes (0,), and its counts of others"),
        ({"classes": [0, 1], "weights": "AACAfwAAgH8AAIB/AACAfw=="}, "weights are not all finite numbers"),
    ],
)
def test_an_impossible_classifier_is_refused(
    coordinator: Coordinator, change_watcher: ChangeWatcher, head: dict[str, Any], words: str
) -> None:
    worker = coordinator.worker("a")
    coordinator.worker("b")
    run_id = coordinator.client.create_run(tiny_spec(evaluation=CROSS_SITE, cohort={"min_clients": 2})).id
    coordinator.advance(run_id)
    body = _cross(_claimed(worker), head=site_head()).model_dump(mode="json")
    body["head"] |= head
    with coordinator.http(coordinator.worker_token("a")) as http, change_watcher.nothing_changes():
        response = http.post(SUBMIT, json=body)
    assert response.status_code == 422
    assert words in response.text
    assert worker.claim_site_evaluation() is not None
