"""A worker whose training was manipulated to send more than it should: no known way of hiding data gets through."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fedssl.artifacts.store import digest_of
from fedssl.artifacts.tensors import Tensors, save_tensors, serialised
from fedssl.client import WorkerClient
from fedssl.errors import ArtifactError, Cancelled, DigestMismatch
from fedssl.methods import METHODS
from fedssl.protocol.plan import ArtifactPlan, TensorSpec
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.site_work import SiteAnswer
from fedssl.protocol.work import Progress, Submit, WorkItem
from fedssl_worker.causes import CannotTrain
from fedssl_worker.data import PublicImages
from fedssl_worker.disclosure.egress import check_update
from fedssl_worker.state import Finished
from support.smuggling import NOT_DECLARED, PAYLOAD, SEVERAL, SMUGGLING, append_payload

from .conftest import CPU, WorkerHarness, make_spec

REDUCER = {"name": "distillation", "num_anchors": 8, "batch_size": 4, "num_epochs": 2}
FLESD: dict[str, Any] = {
    "method": {"name": "flesd", "reducer": REDUCER},
    "public_data": {"dataset": "digits", "num_images": 20},
}
SPECS = {
    "flesd": make_spec(**FLESD),
    "fedrlc": make_spec({"name": "fedrlc"}),
    "fedsimclr": make_spec({"name": "fedsimclr"}),
}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "I64": torch.int64}


def plan_of(spec: RunSpec) -> ArtifactPlan:
    return METHODS[spec.method.name].bind(spec).plan


def update_of(spec: RunSpec) -> Tensors:
    """Return random tensors that match the update's plan."""
    generator = torch.Generator().manual_seed(0)
    return {
        tensor.name: torch.rand(tensor.shape, generator=generator).to(DTYPES[tensor.dtype])
        for tensor in plan_of(spec).update
    }


class Corrupted:
    """An executor whose update is a file that was made by someone else."""

    def __init__(self, update: Path, **metrics: float) -> None:
        self._finished = Finished(update, digest_of(update), 32, metrics)

    def execute(self, item: WorkItem, on_progress: object) -> Finished:
        return self._finished


def send(harness: WorkerHarness, spec: RunSpec, content: bytes, **metrics: float) -> None:
    """Let a whole agent claim the work and get this file as its result."""
    path = harness.folder / "smuggled.safetensors"
    path.write_bytes(content)
    harness.offer(spec, 1)
    agent = harness.restart()
    agent._executor.execute = Corrupted(path, **metrics).execute  # type: ignore[method-assign]
    agent.step()


def assert_nothing_left(harness: WorkerHarness, words: str) -> None:
    assert "PUT artifact" not in harness.coordinator.calls
    assert harness.coordinator.submissions == []
    (declined,) = harness.coordinator.declined
    assert words in declined.reason
    assert PAYLOAD.decode() not in declined.reason


CASES = [(name, case) for name in SPECS for case in SMUGGLING] + [
    (name, case) for name in ("fedrlc", "fedsimclr") for case in SEVERAL
]


@pytest.mark.parametrize(("method", "case"), CASES, ids=[f"{name}: {case}" for name, case in CASES])
def test_a_file_with_smuggled_data_is_refused(method: str, case: str, tmp_path: Path) -> None:
    smuggle, words = {**SMUGGLING, **SEVERAL}[case]
    path = tmp_path / "update"
    path.write_bytes(smuggle(update_of(SPECS[method])))
    with pytest.raises(ArtifactError, match=words):
        check_update(path, plan_of(SPECS[method]))


@pytest.mark.parametrize("method", SPECS)
def test_a_valid_file_is_accepted_and_refused_if_bytes_follow_the_tensors(method: str, tmp_path: Path) -> None:
    path, tensors = tmp_path / "update", update_of(SPECS[method])
    save_tensors(tensors, path)
    check_update(path, plan_of(SPECS[method]))
    path.write_bytes(append_payload(tensors))
    with pytest.raises(ArtifactError, match="longer or shorter than its tensors"):
        check_update(path, plan_of(SPECS[method]))


@pytest.mark.parametrize("case", [*SMUGGLING, *SEVERAL])
def test_an_agent_does_not_send_smuggled_data_and_reports_the_reason(harness: WorkerHarness, case: str) -> None:
    smuggle, words = {**SMUGGLING, **SEVERAL}[case]
    send(harness, SPECS["fedsimclr"], smuggle(update_of(SPECS["fedsimclr"])))
    assert_nothing_left(harness, words)


def test_weights_are_not_sent_if_only_similarities_are_declared(harness: WorkerHarness) -> None:
    send(harness, SPECS["flesd"], serialised(update_of(SPECS["fedsimclr"])))
    assert_nothing_left(harness, NOT_DECLARED)


def test_weights_are_not_sent_in_addition_to_similarities(harness: WorkerHarness) -> None:
    both = update_of(SPECS["fedsimclr"]) | update_of(SPECS["flesd"])
    send(harness, SPECS["flesd"], serialised(both))
    assert_nothing_left(harness, "not declared: encoder")


def test_similarities_are_not_sent_in_addition_to_weights(harness: WorkerHarness) -> None:
    both = update_of(SPECS["fedsimclr"]) | update_of(SPECS["flesd"])
    send(harness, SPECS["fedsimclr"], serialised(both))
    assert_nothing_left(harness, "not declared: factor")


def test_centers_are_not_sent_with_a_method_that_does_not_declare_them(harness: WorkerHarness) -> None:
    assert "centers.mu" in update_of(SPECS["fedrlc"])
    byol = make_spec({"name": "fedbyol"})
    send(harness, byol, serialised(update_of(SPECS["fedrlc"])))
    assert_nothing_left(harness, "not declared: centers.mu")


@pytest.mark.parametrize("width", [3, 5, 8])
def test_a_factor_with_another_width_than_declared_is_not_sent(harness: WorkerHarness, width: int) -> None:
    send(harness, SPECS["flesd"], serialised({"factor": torch.rand(20, width)}))
    assert_nothing_left(harness, f"factor is F32[20, {width}], declared F32[20, 4]")


@pytest.mark.parametrize("name", ["representations", "similarities"])
def test_similarities_in_another_packing_than_the_runs_are_not_sent(harness: WorkerHarness, name: str) -> None:
    shape = (20, 4) if name == "representations" else (190,)
    send(harness, SPECS["flesd"], serialised({name: torch.rand(shape)}))
    assert_nothing_left(harness, f"not declared: {name}")


def test_half_precision_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    spec = make_spec(**{**FLESD, "method": {"name": "flesd", "reducer": {**REDUCER, "packing": "factored-f16"}}})
    factor = update_of(spec)["factor"]
    factor.view(torch.int16).view(-1)[7] = 0x7E0B  # NaN with bits in it
    save_tensors({"factor": factor}, tmp_path / "update")
    with pytest.raises(ArtifactError, match="tensor factor holds NaN or infinity"):
        check_update(tmp_path / "update", plan_of(spec))


# --- A coordinator that asks for more -----------------------------------------------------------------------------


def silent(progress: Progress) -> None:
    pass


@pytest.mark.parametrize("method", SPECS)
@pytest.mark.parametrize(
    "more",
    [
        TensorSpec(name="images", dtype="U8", shape=(32, 1, 16, 16)),
        TensorSpec(name="encoder.private", dtype="F32", shape=(4,), kind="similarity"),
    ],
    ids=["images", "called similarity"],
)
def test_a_plan_that_asks_for_more_tensors_is_refused_before_anything_is_fetched(
    harness: WorkerHarness, method: str, more: TensorSpec
) -> None:
    item = harness.item(SPECS[method], 1)
    wider = item.plan.model_copy(update={"update": (*item.plan.update, more)})
    with pytest.raises(CannotTrain, match=r"artifact plan for \w+ differs from this worker's"):
        harness.executor().execute(item.model_copy(update={"plan": wider}), silent)
    assert harness.coordinator.calls == []


def test_a_plan_that_asks_for_weights_in_place_of_similarities_is_refused(harness: WorkerHarness) -> None:
    item = harness.item(SPECS["flesd"], 1)
    weights = plan_of(SPECS["fedsimclr"]).update
    asking = item.model_copy(update={"plan": item.plan.model_copy(update={"update": weights})})
    with pytest.raises(CannotTrain, match=r"artifact plan for \w+ differs from this worker's"):
        harness.executor().execute(asking, silent)
    relabelled = tuple(tensor.model_copy(update={"kind": "weights"}) for tensor in item.plan.update)
    asking = item.model_copy(update={"plan": item.plan.model_copy(update={"update": relabelled})})
    with pytest.raises(CannotTrain, match=r"artifact plan for \w+ differs from this worker's"):
        harness.executor().execute(asking, silent)


# --- Besides the file ----------------------------------------------------------------------------------------------


def test_a_file_that_was_replaced_after_training_is_not_sent(harness: WorkerHarness) -> None:
    """The digest is the trained file's, so the coordinator would detect even a file that is replaced after the
    check."""
    path, tensors = harness.folder / "update", update_of(SPECS["fedsimclr"])
    save_tensors(tensors, path)
    digest = digest_of(path)
    name = next(iter(tensors))
    save_tensors({**tensors, name: tensors[name] + 1}, path)
    harness.offer(SPECS["fedsimclr"], 1)
    item = harness.client.claim(0)
    assert item is not None
    with pytest.raises(DigestMismatch, match="changed after it was trained"):
        harness.egress().send(item, path, digest)
    assert "PUT artifact" not in harness.coordinator.calls


@pytest.mark.parametrize(
    "metrics",
    [
        {f"m{number}": 0.0 for number in range(65)},
        {"Jane": 1.0},
        {"jane doe": 1.0},
        {"x" * 65: 1.0},
        {"loss": float("nan")},
        {"loss": float("inf")},
    ],
    ids=["too many", "capitals", "a sentence", "a long name", "NaN", "infinity"],
)
def test_metrics_with_too_many_values_or_with_unusual_names_or_numbers_are_not_submitted(
    harness: WorkerHarness, metrics: dict[str, float]
) -> None:
    send(harness, SPECS["fedsimclr"], serialised(update_of(SPECS["fedsimclr"])), **metrics)
    assert harness.coordinator.submissions == []
    assert "jane" not in str(harness.coordinator.declined).lower()


def test_progress_counts_have_an_upper_limit() -> None:
    for name in ("epoch", "num_epochs", "step", "num_steps"):
        counts = {"epoch": 0, "num_epochs": 0, "step": 0, "num_steps": 0, name: int.from_bytes(PAYLOAD)}
        with pytest.raises(ValueError, match="less than or equal to 1000000000000"):
            Progress(phase="training", **counts)  # type: ignore[arg-type]


def test_a_long_reason_is_cut_to_500_characters(harness: WorkerHarness) -> None:
    harness.offer(SPECS["fedsimclr"], 1)
    item = harness.client.claim(0)
    assert item is not None
    harness.client.decline(item.assignment_id, "x" * 100_000)
    (declined,) = harness.coordinator.declined
    assert len(declined.reason) == 500


class Talkative:
    """An executor whose failure quotes data of this machine."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def execute(self, item: WorkItem, on_progress: object) -> Finished:
        raise self._error


@pytest.mark.parametrize("error", [RuntimeError(PAYLOAD.decode()), KeyError(PAYLOAD.decode()), OSError("/home/jane")])
def test_an_unexpected_error_reports_only_its_type(harness: WorkerHarness, error: Exception) -> None:
    harness.offer(SPECS["fedsimclr"], 1)
    agent = harness.restart()
    agent._executor.execute = Talkative(error).execute  # type: ignore[method-assign]
    agent.step()
    (declined,) = harness.coordinator.declined
    assert declined.reason == f"the worker failed unexpectedly ({type(error).__name__}): see its log"


def test_cancelled_work_is_not_declined(harness: WorkerHarness) -> None:
    harness.offer(SPECS["fedsimclr"], 1)
    agent = harness.restart()
    agent._executor.execute = Talkative(Cancelled(PAYLOAD.decode())).execute  # type: ignore[method-assign]
    agent.step()
    assert harness.coordinator.declined == []


def test_the_client_has_only_the_known_calls_and_submission_fields(harness: WorkerHarness) -> None:
    known = set(Submit.model_fields)
    assert known == {"assignment_id", "update", "num_examples", "metrics", "anchor"}
    client_calls = {name for name in vars(WorkerClient) if not name.startswith("_")}
    asks_only = {"enrol", "register", "claim", "heartbeat", "decline", "download", "ended_runs"}
    asks_only |= {"delivery_bytes", "takes_resources", "claim_site_evaluation", "has_site_evaluations"}
    asks_only |= {"pause_seconds", "secure_status"}
    # `send_secure`: test_secure_rounds.py. `report_data`: test_data_reports.py.
    of_egress = {"submit", "upload", "deliver", "answer_site_evaluation", "send_secure", "report_data"}
    assert client_calls == asks_only | of_egress
    # Its counts and its classifier are separate artifacts for the policy and the ledger: see test_site_evaluations.py.
    texts = {"refusal", "no_head"}
    assert set(SiteAnswer.model_fields) == {"evaluation_id", "round_number", "counts", "head", "anchor"} | texts


def test_a_reason_does_not_name_the_folder_of_public_images(harness: WorkerHarness) -> None:
    folder = harness.folder / "Jane Doe" / "public"
    folder.mkdir(parents=True)
    (folder / "shared.npz").write_bytes(b"no archive")
    spec = make_spec(**{**FLESD, "public_data": {"dataset": "shared.npz", "num_images": 20}})
    harness.offer(spec, 1)
    agent = harness.restart()
    agent._executor._public = PublicImages(CPU, folder)
    agent.step()
    (declined,) = harness.coordinator.declined
    assert declined.reason == ("this worker cannot use the run's public images, shared.npz: see its log")
