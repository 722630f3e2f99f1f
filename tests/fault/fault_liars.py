"""Authenticated clients that lie about their weights, their numbers of images, their metrics or their work.

A third client takes part in every round and lies in each. What it sends is refused or left out, the honest clients'
result has the same bits as without it, and every event about it names only this client.
"""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from fault import specs
from fault.federation import FaultFederation
from fault.injected import Injected
from fedssl.artifacts.tensors import Tensors, load_tensors
from fedssl.client import DuplicateUpdate, Gone, Rejected, Retry, WorkerClient
from fedssl.data import ImageData
from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import Outcome
from fedssl.protocol.work import Register, Submit, WorkItem
from fedssl.simulation import simulate
from support.federation import upload

FAULT_CLASS = "hostile clients"
LIAR = "mallory"
NUM_IMAGES = 100
COHORT = {**specs.COHORT, "clients": (*specs.CLIENTS, LIAR), "min_clients": 3, "min_updates": 2}
_ABOUT_LIES = ("update.rejected", "update.weight_refused", "update.unusual", "artifact.refused", "request.refused",
               "assignment.refused", "assignment.foreign", "assignment.declined")  # fmt: skip


@dataclass
class Liar:
    """The dishonest client. It uses the typed client if that can send the lie, and bare HTTP otherwise."""

    worker: WorkerClient
    http: httpx.Client
    folder: Path
    rng: random.Random

    def base(self, item: WorkItem) -> Tensors:
        """Return an honest-looking update of zeros, as declared."""
        kinds = {"F32": torch.float32, "F16": torch.float16, "I64": torch.int64}
        return {each.name: torch.zeros(each.shape, dtype=kinds[each.dtype]) for each in item.plan.update}

    def one_number(self, item: WorkItem, value: float) -> Tensors:
        """Return an update with one wrong number in a randomly drawn tensor."""
        update = self.base(item)
        floats = sorted(name for name, each in update.items() if each.is_floating_point() and each.numel())
        chosen = update[self.rng.choice(floats)].view(-1)
        chosen[self.rng.randrange(len(chosen))] = value
        return update

    def post(self, item: WorkItem, **fields: Any) -> int:
        """Submit with any JSON, and return the status."""
        body = {"assignment_id": str(item.assignment_id), "update": "0" * 64, "num_examples": 1, **fields}
        headers = {"Content-Type": "application/json"}
        return self.http.post("/v1/work/submit", content=json.dumps(body), headers=headers).status_code

    def submit(self, item: WorkItem, update: Tensors, num_examples: int = NUM_IMAGES, **metrics: float) -> Submit:
        digest = upload(self.worker, item, update, self.folder)
        submission = Submit(assignment_id=item.assignment_id, update=digest, num_examples=num_examples, metrics=metrics)
        self.worker.submit(submission)
        return submission


def _not_finite(liar: Liar, item: WorkItem) -> bool:
    wrong = liar.rng.choice([math.nan, math.inf, -math.inf])
    with pytest.raises(Rejected):
        upload(liar.worker, item, liar.one_number(item, wrong), liar.folder)
    return False


def _huge(liar: Liar, item: WorkItem) -> bool:
    liar.submit(item, liar.one_number(item, liar.rng.choice([3e38, -3e38, 1e30])))
    return True


def _negative_variance(liar: Liar, item: WorkItem) -> bool:
    update = liar.base(item)
    chosen = update[liar.rng.choice(sorted(name for name in update if name.endswith(".running_var")))]
    chosen[liar.rng.randrange(len(chosen))] = liar.rng.choice([-0.5, -1e3])
    liar.submit(item, update)
    return True


def _undeclared(liar: Liar, item: WorkItem) -> bool:
    with pytest.raises(Rejected):
        upload(liar.worker, item, {**liar.base(item), "more": torch.ones(3)}, liar.folder)
    return False


def _too_many_images(liar: Liar, item: WorkItem) -> bool:
    with pytest.raises(Rejected):
        liar.submit(item, liar.base(item), liar.rng.choice([NUM_IMAGES + 1, 10**12]))
    return False


def _images_of_another_type(liar: Liar, item: WorkItem) -> bool:
    assert liar.post(item, num_examples=liar.rng.choice(["7", True, 7.5, 7.0, None, [7], -1, 10**30])) == 422
    return False


def _forged_measurement(liar: Liar, item: WorkItem) -> bool:
    with pytest.raises(Rejected):
        liar.submit(item, liar.base(item), update_norm=0.5)
    return False


def _metrics_of_another_type(liar: Liar, item: WorkItem) -> bool:
    assert liar.post(item, metrics={"loss": liar.rng.choice(["0.1", True, None, 1e31, -1e31])}) == 422
    return False


def _work_of_another_client(liar: Liar, item: WorkItem) -> bool:
    foreign = "00000000-0000-4000-8000-000000000000"
    assert liar.post(item, assignment_id=foreign) == 404
    return False


def _other_numbers_afterwards(liar: Liar, item: WorkItem) -> bool:
    """Submit an update that will be left out, and require that other values for it are refused afterwards."""
    accepted = liar.submit(item, liar.one_number(item, 3e38), loss=1.0)
    changes: list[dict[str, Any]] = [{"num_examples": 1}, {"metrics": {"loss": 2.0}}, {"update": "f" * 64}]
    change = liar.rng.choice(changes)
    with pytest.raises((DuplicateUpdate, Gone)):  # Gone: the honest clients had finished, and the round was closed
        liar.worker.submit(accepted.model_copy(update=change))
    return True


LIES = (
    _not_finite,
    _huge,
    _negative_variance,
    _undeclared,
    _too_many_images,
    _images_of_another_type,
    _forged_measurement,
    _metrics_of_another_type,
    _work_of_another_client,
    _other_numbers_afterwards,
)


def _images() -> dict[str, ImageData]:
    honest = specs.images()
    return {**honest, LIAR: honest[specs.CLIENTS[0]]}


@pytest.fixture
def liar(federation: FaultFederation, tmp_path: Path, rng: random.Random) -> Iterator[Liar]:
    token = federation.client.create_token("worker", LIAR).secret
    with httpx.Client(
        base_url=federation.url, headers={"Authorization": f"Bearer {token}"}, timeout=30, trust_env=False
    ) as http:
        worker = WorkerClient(federation.url, token, retry=Retry(seconds=10))
        methods = {name: config.info.version for name, config in METHOD_CONFIGS.items()}
        worker.register(
            Register(worker_version="1", methods=methods, device="cpu", num_images=NUM_IMAGES, channels=1, image_size=8)
        )
        yield Liar(worker, http, tmp_path, rng)
        worker.close()


@pytest.mark.parametrize("method", ["fedbyol", "scaffold"])
def test_lies_do_not_change_the_honest_clients_result(
    method: str, federation: FaultFederation, liar: Liar, injected: Injected
) -> None:
    lies = liar.rng.sample(LIES, k=len(LIES))
    spec = specs.spec(method, num_rounds=len(lies), cohort=COHORT)
    run_id = federation.begin(spec)
    for number, lie in enumerate(lies, start=1):
        item = federation.until(lambda: liar.worker.claim(1), f"round {number}")
        assert item.round_number == number
        injected.note("lie", LIAR, lie.__name__.strip("_").replace("_", " "))
        is_submitted = lie(liar, item)
        injected.settle("left out and named" if is_submitted else "refused")
        if not is_submitted:
            liar.worker.decline(item.assignment_id, "nothing honest to send")
    run = federation.finished(run_id)
    assert run.outcome == Outcome.COMPLETED, run.reason
    _same_as_without(federation, run_id, spec)
    events = list(federation.client.event_log(run_id))
    assert {event.client_id for event in events if event.kind in _ABOUT_LIES} == {LIAR}
    rounds = list(federation.client.rounds(run_id))
    assert [each.verdict for each in rounds] == ["partial"] * len(lies)
    used = {a.client_id for each in rounds for a in each.assignments if a.state == "accepted"}
    assert used == set(specs.CLIENTS)


def _same_as_without(federation: FaultFederation, run_id: Any, spec: RunSpec) -> None:
    cohorts = dict.fromkeys(range(1, spec.num_rounds + 1), specs.CLIENTS)
    expected = simulate(spec, _images(), cohorts=cohorts).model
    path = federation.folder / "model.safetensors"
    federation.client.download_model(run_id, path)
    deployed = load_tensors(path)
    assert [name for name in expected if not torch.equal(deployed[name], expected[name])] == []


def test_an_inflated_update_within_all_bounds_raises_an_alarm_that_names_the_liar(
    federation: FaultFederation, liar: Liar, injected: Injected
) -> None:
    """Weights that are inflated by a million are finite, so they enter the mean, but the event names their client."""
    spec = specs.spec("fedbyol", num_rounds=1, cohort=COHORT)
    run_id = federation.begin(spec)
    item = federation.until(lambda: liar.worker.claim(1), "the round")
    injected.note("lie", LIAR, "inflated weights")
    liar.submit(
        item, {name: each + 1e6 if each.is_floating_point() else each for name, each in liar.base(item).items()}
    )
    federation.finished(run_id)
    unusual = [event for event in federation.client.event_log(run_id) if event.kind == "update.unusual"]
    assert [event.client_id for event in unusual] == [LIAR]
    assert "update_norm" in unusual[0].message
    injected.settle("alarm names the client")


def test_a_clients_share_is_bounded_whatever_number_of_images_it_claims(
    federation: FaultFederation, liar: Liar, injected: Injected
) -> None:
    """The liar registers with the most images that the protocol allows, but gets only its bounded share of the mean."""
    registration = Register(
        worker_version="1", methods={"fedbyol": METHOD_CONFIGS["fedbyol"].info.version}, device="cpu",
        num_images=10**9, channels=1, image_size=8,
    )  # fmt: skip
    liar.worker.register(registration)
    injected.note("lie", LIAR, "a billion images")
    spec = specs.spec("fedbyol", num_rounds=1, cohort=COHORT, robustness={"max_weight_share": 0.4})
    run_id = federation.begin(spec)
    item = federation.until(lambda: liar.worker.claim(1), "the round")
    liar.submit(item, liar.base(item), 10**9)
    run = federation.finished(run_id)
    assert run.outcome == Outcome.COMPLETED, run.reason
    shares = {m.client_id: m.value for m in federation.client.metrics(run_id, "update_weight_share")}
    assert shares[LIAR] == pytest.approx(0.4, rel=1e-9)
    changed = federation.query("SELECT client_id FROM events WHERE kind = 'client.images_changed'")
    assert (LIAR,) in changed
    assert [e.client_id for e in federation.client.event_log(run_id) if e.kind == "update.unusual"] == [LIAR]
    injected.settle("share bounded and client named")
