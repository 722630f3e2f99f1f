"""Encoders that clients declare: stored at registration, and copied into a run's spec when the run is created."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedssl.cli.main import app
from fedssl.client import Conflict, Rejected, WorkerClient
from fedssl.protocol.methods.distillation import distillation_of
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.work import Register
from support.coordinator import Coordinator
from support.federation import tiny_spec
from support.tables import Tables

RESNET = EncoderConfig(name="resnet18")
WIDE = EncoderConfig(name="convnet", widths=(4, 16))
OF_THE_RUN = EncoderConfig(name="convnet", widths=(4, 8), stem="imagenet")  # the stem is not used: the run's network
REDUCER = {"name": "distillation", "num_anchors": 16, "batch_size": 8, "num_epochs": 2, "client_encoders": "declared"}
COHORT = {"clients": ["a", "b", "c"], "min_clients": 3}


def _spec(reducer: dict[str, Any] | None = None, **changes: Any) -> RunSpec:
    method = {"name": "flesd", "reducer": {**REDUCER, **(reducer or {})}}
    sections = {"method": method, "public_data": {"dataset": "digits", "num_images": 40}, "cohort": COHORT}
    return tiny_spec(**{**sections, **changes})


def _register(worker: WorkerClient, encoder: EncoderConfig | None) -> None:
    worker.register(
        Register(
            worker_version="test",
            methods={"flesd": 2, "fedalignuniform": 1},
            device="cpu",
            num_images=100,
            channels=1,
            image_size=8,
            encoder=encoder,
        )
    )


def _workers(coordinator: Coordinator, **encoders: EncoderConfig | None) -> dict[str, WorkerClient]:
    workers = {name: coordinator.worker(name, register=False) for name in encoders}
    for name, encoder in encoders.items():
        _register(workers[name], encoder)
    return workers


def _encoders(spec: RunSpec) -> Any:
    config = distillation_of(spec.method)
    assert config is not None
    return config.client_encoders


def test_the_encoder_that_a_client_declared_last_is_shown(coordinator: Coordinator) -> None:
    workers = _workers(coordinator, a=RESNET, b=None)
    assert coordinator.client.client("a").encoder == RESNET
    assert coordinator.client.client("b").encoder is None
    with coordinator.http() as http:
        shown = {client["id"]: client["encoder"] for client in http.get("/v1/clients").json()["items"]}
    assert shown == {"a": {"name": "resnet18", "stem": "cifar", "widths": [32, 64, 128, 256]}, "b": None}
    _register(workers["a"], WIDE)
    assert coordinator.client.client("a").encoder == WIDE
    _register(workers["a"], None)
    assert coordinator.client.client("a").encoder is None


def test_the_command_line_shows_declared_encoders(
    coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _workers(coordinator, a=RESNET, b=None)
    (tmp_path / "token").write_text(coordinator.operator_token)
    (tmp_path / "token").chmod(0o600)
    monkeypatch.setenv("FEDSSL_URL", coordinator.url)
    monkeypatch.setenv("FEDSSL_TOKEN_FILE", str(tmp_path / "token"))
    for arguments in (["client", "ls"], ["client", "show", "a"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert "resnet18 (cifar stem)" in result.stdout
    document = json.loads(CliRunner().invoke(app, ["client", "show", "a", "--format", "json"]).stdout)
    assert document["encoder"] == RESNET.model_dump(mode="json")


def test_the_registration_event_names_the_encoder(coordinator: Coordinator, tables: Tables) -> None:
    _workers(coordinator, a=RESNET)
    message = tables.one("SELECT message FROM events WHERE kind = 'client.registered'")
    assert message == "100 images, cpu, worker test, encoder resnet18 (cifar stem)"


def test_a_new_run_copies_declared_encoders_into_its_spec(coordinator: Coordinator) -> None:
    workers = _workers(coordinator, a=RESNET, b=None, c=OF_THE_RUN)
    run = coordinator.client.create_run(_spec())
    assert _encoders(run.spec) == {"a": RESNET}
    assert run.spec == _spec({"client_encoders": {"a": RESNET.model_dump()}})
    coordinator.advance(run.id)
    item = workers["b"].claim(0)
    assert item is not None
    assert item.spec == run.spec


def test_a_spec_has_no_encoders_if_no_client_declared_one(coordinator: Coordinator) -> None:
    _workers(coordinator, a=None, b=None, c=None)
    assert _encoders(coordinator.client.create_run(_spec()).spec) == {}


def test_a_run_without_named_clients_takes_all_declared_encoders(coordinator: Coordinator) -> None:
    _workers(coordinator, a=RESNET, b=WIDE)
    _workers(coordinator, z=WIDE)
    coordinator.client.revoke_client("z")
    run = coordinator.client.create_run(_spec(cohort={"min_clients": 2}))
    assert _encoders(run.spec) == {"a": RESNET, "b": WIDE}


def test_a_later_declaration_changes_no_existing_run(coordinator: Coordinator) -> None:
    workers = _workers(coordinator, a=RESNET, b=None, c=None)
    run = coordinator.client.create_run(_spec())
    _register(workers["a"], WIDE)
    assert _encoders(coordinator.client.run(run.id).spec) == {"a": RESNET}
    assert _encoders(coordinator.client.create_run(_spec()).spec) == {"a": WIDE}


def test_specs_that_list_their_encoders_stay_unchanged(coordinator: Coordinator) -> None:
    _workers(coordinator, a=RESNET, b=None, c=None)
    spec = _spec({"client_encoders": {"a": RESNET.model_dump(), "b": WIDE.model_dump()}})
    assert coordinator.client.create_run(spec).spec == spec
    weights = tiny_spec(cohort=COHORT)
    assert coordinator.client.create_run(weights).spec == weights


def test_the_same_key_returns_the_same_run_after_new_declarations(coordinator: Coordinator) -> None:
    workers = _workers(coordinator, a=RESNET, b=None, c=None)
    run = coordinator.client.create_run(_spec(), idempotency_key="once")
    _register(workers["a"], WIDE)
    coordinator.client.revoke_client("b")  # a new run would be refused
    assert coordinator.client.create_run(_spec(), idempotency_key="once").id == run.id
    with pytest.raises(Conflict, match="not all encoders are declared"):
        coordinator.client.create_run(_spec())
    for other in (_spec(seed=1), _spec({"client_encoders": {"a": WIDE.model_dump()}}), tiny_spec(cohort=COHORT)):
        with pytest.raises(Conflict, match="has another spec"):
            coordinator.client.create_run(other, idempotency_key="once")


def test_a_run_is_refused_if_some_of_its_clients_have_not_registered(coordinator: Coordinator, tables: Tables) -> None:
    _workers(coordinator, a=RESNET)
    coordinator.worker_token("b")
    with pytest.raises(Conflict, match=r"b, c of cohort\.clients have not registered or were revoked"):
        coordinator.client.create_run(_spec())
    with pytest.raises(Conflict, match=r"1 of 3 clients \(cohort\.min_clients\) has registered"):
        coordinator.client.create_run(_spec(cohort={"min_clients": 3}))
    assert tables.one("SELECT count(*) FROM runs") == 0


def test_declared_encoders_that_do_not_fit_the_spec_are_refused(coordinator: Coordinator, tables: Tables) -> None:
    _workers(coordinator, a=RESNET, b=None, c=None)
    no_projector = {"encoder": {"widths": [4, 8]}, "projector": None}
    spec = _spec({"packing": "representations-f32"}, model=no_projector)
    with pytest.raises(Rejected, match="a outputs 512 numbers per image, the others 8"):
        coordinator.client.create_run(spec)
    assert tables.one("SELECT count(*) FROM runs") == 0
    assert _encoders(coordinator.client.create_run(_spec(model=no_projector)).spec) == {"a": RESNET}


def test_an_event_gives_the_reason_why_a_client_declines(coordinator: Coordinator) -> None:
    """The worker compares the encoders: it may have declared another one after the run was created."""
    workers = _workers(coordinator, a=RESNET, b=None, c=None)
    run = coordinator.client.create_run(_spec(cohort={**COHORT, "max_attempts": 1}))
    coordinator.advance(run.id)
    _register(workers["a"], WIDE)
    item = workers["a"].claim(0)
    assert item is not None
    config = distillation_of(item.spec.method)
    assert config is not None
    assert config.encoder_of("a", item.spec.model) == RESNET
    workers["a"].decline(item.assignment_id, "the run gives a the encoder resnet18, and it has declared another")
    events = [event for event in coordinator.client.event_log(run.id) if event.client_id == "a"]
    assert events[-1].kind == "assignment.declined"
    assert "the run gives a the encoder resnet18" in events[-1].message
