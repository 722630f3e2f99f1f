"""A worker that declares its encoder: how it is written, what the coordinator receives, and work that does not fit."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.work import Progress
from fedssl_worker.bootstrap import EXIT_REFUSED, run_worker
from fedssl_worker.causes import CannotTrain
from fedssl_worker.executor import Executor
from fedssl_worker.settings import Settings

from .conftest import CLIENT, CPU, WorkerHarness, make_spec, write_images
from .coordinator import TOKEN, Refusal

MODEL = {"encoder": {"name": "convnet", "widths": [4, 8]}, "projector": {"hidden_dims": [8], "out_dim": 4}}
OWN = EncoderConfig(name="convnet", widths=(4, 6, 8))


def flesd(client_encoders: Any = None) -> RunSpec:
    reducer = {"name": "distillation", "num_anchors": 8, "batch_size": 4, "client_encoders": client_encoders or {}}
    method = {"name": "flesd", "reducer": reducer}
    return make_spec(method, model=MODEL, public_data={"dataset": "digits", "num_images": 20})


def executor(harness: WorkerHarness, encoder: EncoderConfig | None) -> Executor:
    folder = harness.folder / "broadcasts"
    return Executor(
        harness.client, harness.images, harness.states(), folder, client_id=CLIENT, device=CPU, encoder=encoder
    )


def silent(progress: Progress) -> None:
    pass


def settings(tmp_path: Path, **changes: Any) -> Settings:
    return Settings(coordinator="http://127.0.0.1:1", data="digits", state=tmp_path, **changes)


@pytest.mark.parametrize(
    ("text", "encoder"),
    [
        ("resnet18", EncoderConfig(name="resnet18")),
        (' { "name": "convnet", "widths": [4, 6, 8] } ', OWN),
        ("{ name = 'convnet', widths = [4, 6, 8] }", OWN),
        ('{ name = "resnet50", stem = "imagenet" }', EncoderConfig(name="resnet50", stem="imagenet")),
        ("", None),
    ],
)
def test_an_encoder_is_given_as_a_name_or_as_a_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, encoder: Any
) -> None:
    assert settings(tmp_path, encoder=text).encoder == encoder
    monkeypatch.setenv("FEDSSL_WORKER_ENCODER", text)
    assert settings(tmp_path).encoder == encoder


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("resnet19", "'vit-tiny', 'vit-small', 'vit-base' or 'timm'"),
        ("{ name }", "write a name such as resnet18"),
        ("{" * 5000, "write a name such as resnet18"),
        ('{ "name": "convnet", "width": [4] }', "Extra inputs are not permitted"),
        ('{ name = "convnet", widths = [0] }', "greater than or equal to 1"),
    ],
)
def test_an_invalid_encoder_is_refused_with_a_reason(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValidationError, match="encoder") as caught:
        settings(tmp_path, encoder=text)
    assert words in str(caught.value)


@pytest.mark.parametrize("encoder", [OWN, None])
def test_the_coordinator_receives_the_declared_encoder(harness: WorkerHarness, encoder: EncoderConfig | None) -> None:
    def revoke(call: str) -> None:
        if call == "claim":
            raise Refusal("unauthenticated", 401, "The token was revoked.")

    harness.coordinator.before = revoke
    data = str(write_images(harness.folder / "own.npz"))
    given = settings(harness.folder / "state").model_copy(
        update={"coordinator": harness.coordinator.url, "data": data, "token": SecretStr(TOKEN), "encoder": encoder}
    )
    assert run_worker(given) == EXIT_REFUSED
    (introduction,) = harness.coordinator.introductions
    assert introduction.encoder == encoder


@pytest.mark.parametrize(
    ("declared", "client_encoders"),
    [
        (None, {}),
        (None, {CLIENT: {"name": "convnet", "widths": [4, 6, 8]}}),
        (OWN, {CLIENT: {"name": "convnet", "widths": [4, 6, 8]}}),
        (OWN, {CLIENT: {"name": "convnet", "widths": [4, 6, 8], "stem": "imagenet"}}),
        (EncoderConfig(name="convnet", widths=(4, 8)), {}),
    ],
    ids=["nothing declared", "only given", "as declared", "same architecture", "the run's"],
)
def test_work_that_fits_the_declared_encoder_is_done(
    harness: WorkerHarness, declared: EncoderConfig | None, client_encoders: Any
) -> None:
    item = harness.item(flesd(client_encoders), 1)
    assert executor(harness, declared).execute(item, silent).num_examples == 32


@pytest.mark.parametrize(
    ("client_encoders", "given"),
    [
        ({}, "convnet 4-8"),
        ({CLIENT: {"name": "resnet18"}}, r"resnet18 \(cifar stem\)"),
        ({"hospital-b": {"name": "convnet", "widths": [4, 6, 8]}}, "convnet 4-8"),
    ],
    ids=["the run's", "another", "another client's"],
)
def test_work_for_another_encoder_is_refused_before_anything_is_fetched(
    harness: WorkerHarness, client_encoders: Any, given: str
) -> None:
    item = harness.item(flesd(client_encoders), 1)
    what = f"gives {CLIENT} the encoder {given}, and its worker has declared convnet 4-6-8: create a run with"
    with pytest.raises(CannotTrain, match=what):
        executor(harness, OWN).execute(item, silent)
    assert harness.coordinator.calls == []


def test_an_agent_declines_work_for_another_encoder_with_the_reason(harness: WorkerHarness) -> None:
    harness.offer(flesd(), 1)
    agent = harness.restart()
    agent._executor = executor(harness, OWN)
    agent.step()
    (declined,) = harness.coordinator.declined
    assert "has declared convnet 4-6-8" in declined.reason
    assert 'method.reducer.client_encoders = "declared"' in declined.reason
    assert harness.coordinator.submissions == []


def test_a_declared_encoder_is_ignored_if_all_clients_train_the_same_network(harness: WorkerHarness) -> None:
    item = harness.item(make_spec({"name": "fedsimclr"}), 1)
    assert executor(harness, OWN).execute(item, silent).num_examples == 32


def test_a_restarted_worker_restores_its_own_network_from_the_client_state(harness: WorkerHarness) -> None:
    """The network is client state, promoted with the accepted update: a kill between two rounds loses nothing."""
    spec = flesd({CLIENT: {"name": "convnet", "widths": [4, 6, 8]}})
    for _ in range(2):
        harness.offer(spec, len(harness.coordinator.submissions) + 1)
        agent = harness.restart()
        agent._executor = executor(harness, OWN)
        agent.step()
    assert len(harness.coordinator.submissions) == 2
    last = harness.coordinator.last_accepted
    assert last is not None
    state = harness.states().accepted(harness.item(spec, 3).run_id, last)
    assert state is not None
    assert state["encoder.blocks.2.conv.weight"].shape == (8, 6, 3, 3)
