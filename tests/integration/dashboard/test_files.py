"""The Files tab: what it lists, and that each file contains what its name promises."""

import hashlib
from uuid import UUID

import pytest
import structlog
import yaml
from safetensors.torch import load

from fedssl.artifacts.store import FileStore
from fedssl.errors import StoreUnavailable
from fedssl.protocol.runs import RunSpec
from support.pages import Browser
from support.scenario import Scenario


def test_the_files_tab_lists_weights_card_and_lineage(viewer: Browser, scenario: Scenario) -> None:
    text = viewer.get(f"/runs/{scenario.id}/files").text
    for path in (
        "encoder",
        "files/encoder.safetensors",
        "files/model-card.md",
        "files/lineage.json",
        "files/spec.yaml",
    ):
        assert f'href="/runs/{scenario.id}/{path}"' in text
    assert f"/files/weights/{scenario.run.initial_model}" in text
    assert "fedssl export" in text


def test_the_encoder_file_has_exactly_the_encoders_tensors(viewer: Browser, scenario: Scenario) -> None:
    weights = viewer.get(f"/runs/{scenario.id}/encoder")
    assert weights.headers["content-disposition"] == f'attachment; filename="weights-{scenario.id}.safetensors"'
    whole = load(weights.content)
    answer = viewer.get(f"/runs/{scenario.id}/files/encoder.safetensors")
    encoder = load(answer.content)
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert encoder.keys() == {name for name in whole if name.startswith("encoder.")}
    assert all(encoder[name].equal(whole[name]) for name in encoder)


def test_the_card_and_the_lineage_have_the_digests_of_the_downloads(viewer: Browser, scenario: Scenario) -> None:
    encoder = viewer.get(f"/runs/{scenario.id}/files/encoder.safetensors").content
    lineage = viewer.get(f"/runs/{scenario.id}/files/lineage.json").json()
    assert lineage["encoder"] == hashlib.sha256(encoder).hexdigest()
    assert lineage["model"] == scenario.run.model
    assert sorted(lineage["rounds"][0]["updates"]) == ["a", "b"]
    card = viewer.get(f"/runs/{scenario.id}/files/model-card.md").text
    assert lineage["encoder"] in card
    spec = RunSpec.model_validate(yaml.safe_load(viewer.get(f"/runs/{scenario.id}/files/spec.yaml").text))
    assert spec == scenario.run.spec


def test_only_weights_of_the_run_are_served(viewer: Browser, scenario: Scenario) -> None:
    initial = scenario.run.initial_model
    assert initial is not None
    answer = viewer.get(f"/runs/{scenario.id}/files/weights/{initial}")
    assert hashlib.sha256(answer.content).hexdigest() == initial
    for run, digest in ((scenario.id, "0" * 64), (UUID(int=7), initial)):
        assert viewer.get(f"/runs/{run}/files/weights/{digest}").status_code == 404


@pytest.mark.parametrize("name", ["encoder.safetensors", "lineage.json", "model-card.md"])
def test_files_of_weights_are_refused_for_a_run_without_weights(
    operator: Browser, scenario: Scenario, name: str
) -> None:
    fresh = operator.send("/runs/new", method="ssd", start="later").headers["location"]
    assert operator.get(f"{fresh}/files").status_code == 200
    answer = operator.get(f"{fresh}/files/{name}")
    assert answer.status_code == 409
    assert "has no weights yet" in answer.text


_BY_THE_STORE = ("encoder", "files/encoder.safetensors", "files/model-card.md", "files/lineage.json")


@pytest.mark.parametrize("path", _BY_THE_STORE)
def test_an_unavailable_store_is_reported_on_a_page(
    viewer: Browser, scenario: Scenario, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def unavailable(*_: object) -> int:
        raise StoreUnavailable("the object store does not do as asked: no route to s3.internal")

    for name in ("size", "version"):
        monkeypatch.setattr(FileStore, name, unavailable)
    answer = viewer.get(f"/runs/{scenario.id}/{path}", accept="text/html")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "The store of the artifacts is not answering." in answer.text
    assert "s3.internal" not in answer.text


def test_an_unexpected_error_is_reported_on_a_page(
    viewer: Browser, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> int:
        raise OSError(5, "Input/output error", "/srv/store")

    monkeypatch.setattr(FileStore, "size", failing)
    monkeypatch.setattr("fedssl_coordinator.app.log", structlog.wrap_logger(structlog.ReturnLogger(), []))
    answer = viewer.get(f"/runs/{scenario.id}/files/encoder.safetensors", accept="text/html,*/*;q=0.8")
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "log has the details" in answer.text
    assert "/srv/store" not in answer.text


def test_an_unexpected_error_after_a_form_is_reported_on_a_page(
    operator: Browser, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise OSError(5, "Input/output error", "/srv/store")

    monkeypatch.setattr("fedssl_coordinator.dashboard.run.forms.service.edit", failing)
    monkeypatch.setattr("fedssl_coordinator.app.log", structlog.wrap_logger(structlog.ReturnLogger(), []))
    answer = operator.send(f"/runs/{scenario.id}/edit", headers={"Accept": "text/html"}, name="other")
    assert (answer.status_code, answer.headers["content-type"]) == (500, "text/html; charset=utf-8")
    assert "log has the details" in answer.text
