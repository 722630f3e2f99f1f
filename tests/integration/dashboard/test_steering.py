"""Changes from the web page are accepted only from a form of the same session, and only for permitted roles."""

import json
import re
from html import unescape
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from fedssl.experiments.papers import cell
from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.protocol.runs import RunSpec
from fedssl_coordinator.core.queues import redis_connection
from fedssl_coordinator.dashboard.new_run import spec_form
from fedssl_coordinator.dashboard.new_run.fields import all_fields
from support.coordinator import Coordinator
from support.federation import tiny_spec
from support.methods import method_spec
from support.pages import Browser, fields_with_a_mistake
from support.tables import Tables

WITH_PUBLIC_DATA = ("fedca", "flesd")
UNUSUAL = ("ssd", "flesd", "fedmae")
METHODS = [*UNUSUAL, *sorted(METHOD_CONFIGS.keys() - set(UNUSUAL))]
"""First those whose forms differ most: add-ons and a template; a server that distils; another encoder."""


def _run(shared_coordinator: Coordinator) -> str:
    return str(
        shared_coordinator.client.create_run(tiny_spec(name="steered", cohort={"min_clients": 90}), start=False).id
    )


def test_a_run_is_started_paused_resumed_and_stopped(shared_coordinator: Coordinator, operator: Browser) -> None:
    run = _run(shared_coordinator)
    for verb, state in (("start", "running"), ("pause", "paused"), ("resume", "running"), ("stop", "finished")):
        assert f'action="/runs/{run}/{verb}"' in operator.get(f"/runs/{run}/{verb}/confirm").text
        answer = operator.send(f"/runs/{run}/{verb}")
        assert (answer.status_code, answer.headers["location"]) == (303, f"/runs/{run}")
        assert operator.get(f"/runs/{run}/spec").status_code == 200
        assert shared_coordinator.client.run(run).state == state
    for verb in ("start", "pause", "resume", "stop"):  # each would be refused
        assert operator.get(f"/runs/{run}/{verb}/confirm").headers["location"] == f"/runs/{run}"
    assert operator.send(f"/runs/{run}/resume").status_code == 409


def test_a_failed_run_can_be_resumed_from_its_page(shared_coordinator: Coordinator, operator: Browser) -> None:
    run = _run(shared_coordinator)
    assert f'href="/runs/{run}/resume/confirm"' not in operator.get(f"/runs/{run}").text
    with Tables(shared_coordinator.database_url) as tables:
        tables.execute("UPDATE runs SET state = 'finished', outcome = 'failed', reason = 'no GPU' WHERE id = %s", run)
    page = operator.get(f"/runs/{run}").text
    assert f'href="/runs/{run}/resume/confirm"' in page
    assert f'href="/runs/new?from={run}">make a new run from this spec' in page
    assert not re.search("appear with|Appears after|First evaluation after|waits for|to make one", page)
    assert "It failed because: no GPU." in operator.get(f"/runs/{run}/resume/confirm").text
    assert operator.send(f"/runs/{run}/resume").status_code == 303
    assert shared_coordinator.client.run(run).state == "running"
    shared_coordinator.client.stop(run)


@pytest.mark.parametrize("fields", [{}, {"csrf": ""}, {"csrf": "0" * 64}, {"csrf": "ä"}])
def test_a_form_without_the_sessions_secret_changes_nothing(
    shared_coordinator: Coordinator, operator: Browser, fields: dict[str, str]
) -> None:
    run = _run(shared_coordinator)
    assert operator.http.post(f"/runs/{run}/stop", data=fields).status_code == 403
    assert shared_coordinator.client.run(run).state == "created"


def test_the_secret_of_another_session_is_refused(
    shared_coordinator: Coordinator, operator: Browser, admin: Browser
) -> None:
    run = _run(shared_coordinator)
    assert operator.http.post(f"/runs/{run}/stop", data={"csrf": admin.csrf}).status_code == 403
    assert shared_coordinator.client.run(run).state == "created"


def test_a_form_from_another_site_changes_nothing(shared_coordinator: Coordinator, operator: Browser) -> None:
    run = _run(shared_coordinator)
    for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "same-site"}):
        assert operator.send(f"/runs/{run}/stop", headers=headers).status_code == 403
    assert shared_coordinator.client.run(run).state == "created"


def test_a_viewer_cannot_change_anything(shared_coordinator: Coordinator, viewer: Browser) -> None:
    run = _run(shared_coordinator)
    for path in (f"/runs/{run}/stop", f"/runs/{run}/start", "/runs/new", "/clients/a/revoke"):
        assert viewer.send(path, method="ssd", name="a").status_code == 403
    assert shared_coordinator.client.run(run).state == "created"
    assert "/stop" not in viewer.get(f"/runs/{run}").text


def test_only_an_admin_may_revoke_a_client_and_must_type_its_name(
    shared_coordinator: Coordinator, operator: Browser, admin: Browser, tables: Tables
) -> None:
    shared_coordinator.worker("leaver")
    assert operator.send("/clients/leaver/revoke", name="leaver").status_code == 403
    assert "Revoke" not in operator.get("/clients/leaver").text
    for typed in ("", "Leaver", "leaver "):
        answer = admin.send("/clients/leaver/revoke", name=typed)
        assert answer.status_code == 422
        assert fields_with_a_mistake(answer.text) == ["name"]
    assert shared_coordinator.client.client("leaver").revoked_at is None
    assert admin.send("/clients/leaver/revoke", name="leaver").status_code == 303
    assert shared_coordinator.client.client("leaver").revoked_at is not None


def test_the_form_creates_the_run_that_it_shows_once(shared_coordinator: Coordinator, operator: Browser) -> None:
    fields = {
        "method": "fedbyol",
        "key": "ab12",
        "start": "later",
        "spec.name": "from the form",
        "spec.training.optimizer.learning_rate": "1e-2",
        "spec.model.encoder.widths": "[8, 16]",
        "spec.cohort.without_quorum": "skip",
        "spec.training.drop_last": "false",
    }
    first = operator.send("/runs/new", **fields)
    assert first.status_code == 303
    assert (
        operator.send("/runs/new", **fields).headers["location"] == first.headers["location"]
    )  # it was sent twice but created once
    spec = shared_coordinator.client.run(first.headers["location"].removeprefix("/runs/")).spec
    assert (spec.name, spec.method.name, spec.cohort.without_quorum) == ("from the form", "fedbyol", "skip")
    assert spec.training.optimizer.learning_rate == 0.01
    assert spec.training.drop_last is False
    assert spec.model.encoder.model_dump()["widths"] == (8, 16)


@pytest.mark.full(but=len(UNUSUAL))
@pytest.mark.parametrize("method", METHODS)
def test_every_methods_form_opens_and_creates_the_run_that_it_shows(
    shared_coordinator: Coordinator, operator: Browser, method: str
) -> None:
    fields = {"spec.name": f"{method} from its form", "spec.num_rounds": "3", "spec.seed": "11"}
    if method in WITH_PUBLIC_DATA:
        fields["spec.public_data.dataset"] = "digits"
    if method == "fedmae":
        fields["spec.model.encoder.name"] = "vit-tiny"
    page = operator.get(f"/runs/new?method={method}")
    assert page.status_code == 200
    for name in METHOD_CONFIGS[method].model_fields.keys() - {"name"}:
        assert f'name="spec.method.{name}' in page.text, name
    checked = operator.send("/runs/new/check", method=method, **fields)
    assert "These settings are valid" in checked.text
    made = operator.send("/runs/new", method=method, start="later", **fields)
    assert made.status_code == 303, made.text
    spec = shared_coordinator.client.run(made.headers["location"].removeprefix("/runs/")).spec
    assert spec == RunSpec.model_validate(_given(checked.text))
    assert (spec.method.name, spec.num_rounds, spec.seed) == (method, 3, 11)


def _given(text: str) -> dict[str, Any]:
    """Return the spec that a page shows."""
    shown: dict[str, Any] = json.loads(unescape(text.split('aria-label="Spec, as JSON">')[1].split("</pre>")[0]))
    return shown


_NONE: dict[str, Any] = {
    "evaluation": {"dataset": "held-out", "max_train": None, "every": 0},
    "watch": {"min_effective_rank": None, "min_feature_std": None},
    "partition": {"dataset": "digits", "num_clients": 3, "scheme": "iid", "alpha": None},
    "robustness": {"max_update_norm": 3.0},
}
_SECURE: dict[str, Any] = {"aggregation": {"arithmetic": "fixed"}, "secure_aggregation": {}}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("changes", [{}, _NONE], ids=["unchanged", "with every optional section"])
def test_the_values_of_a_form_filled_from_a_spec_give_the_same_spec(method: str, changes: dict[str, Any]) -> None:
    spec = method_spec(method, **changes)
    values = spec_form.values_of(spec.model_dump(mode="json"), method)
    assert spec_form.check(method, values).spec == spec


@pytest.mark.full(but=len(UNUSUAL))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("changes", [_NONE, {}], ids=["with every optional section", "unchanged"])
def test_a_form_filled_from_a_run_gives_the_same_spec(
    shared_coordinator: Coordinator, operator: Browser, tables: Tables, method: str, changes: dict[str, Any]
) -> None:
    spec = method_spec(method, **changes)
    run = shared_coordinator.client.create_run(method_spec(method), start=False).id
    tables.execute("UPDATE runs SET spec = %s WHERE id = %s", Jsonb(spec.model_dump(mode="json")), run)
    page = operator.get(f"/runs/new?from={run}")
    assert page.status_code == 200
    assert RunSpec.model_validate(_given(page.text)) == spec


@pytest.mark.parametrize("changes", [_SECURE, {"upload": {"dtype": "bfloat16"}}], ids=["secure", "half the bytes"])
def test_a_copied_run_keeps_secure_aggregation_and_the_upload_format(
    shared_coordinator: Coordinator, operator: Browser, changes: dict[str, Any]
) -> None:
    run = shared_coordinator.client.create_run(method_spec("fedsimclr", **changes), start=False)
    page = operator.get(f"/runs/new?from={run.id}")
    assert RunSpec.model_validate(_given(page.text)) == run.spec


def test_a_form_can_set_none_if_the_default_is_an_object(
    shared_coordinator: Coordinator, operator: Browser, tables: Tables
) -> None:
    model = {"encoder": {"widths": [8, 16]}, "projector": None}
    spec = method_spec("supervised", model=model)
    run = shared_coordinator.client.create_run(spec, start=False).id
    assert RunSpec.model_validate(_given(operator.get(f"/runs/new?from={run}").text)) == spec
    both = {"spec.model.projector": "null", "spec.model.projector.out_dim": "8"}
    checked = operator.send("/runs/new/check", method="supervised", **both)
    assert "leave this empty: model.projector is set to none" in checked.text


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("spec.num_rounds", "0", "num_rounds"),
        ("spec.num_rounds", "many", "write a whole number"),
        ("spec.model.encoder.widths", "8, wide", "write numbers with commas"),
        ("spec.training.optimizer.learning_rate", "-1", "learning_rate"),
        ("spec.name", "<b>", "name"),
        ("spec.cohort.clients", "No Name", "at most 63 lower-case letters, digits and hyphens"),
        ("spec.method.uniformity_weight", '"x"', "uniformity_weight"),
        ("spec.cohort.deadline_seconds", "true", "write a number such as 0.05 or 1e-4"),
        ("spec.cohort.min_clients", "true", "write a whole number"),
    ],
)
def test_an_error_is_shown_next_to_its_field(operator: Browser, field: str, value: str, word: str) -> None:
    fields = {"method": "fedalignuniform", field: value}
    checked = operator.send("/runs/new/check", **fields)
    assert checked.status_code == 200
    assert f'data-key="{field.removeprefix("spec.")}"' in checked.text
    assert word in checked.text
    answer = operator.send("/runs/new", **fields)
    assert answer.status_code == 422
    assert 'aria-invalid="true"' in answer.text
    ids = set(re.findall(r'\bid="([^"]+)"', answer.text))
    described = re.findall(r'aria-describedby="([^"]+)"( aria-invalid)?', answer.text)
    assert {place for places, _ in described for place in places.split()} <= ids
    assert [places.split()[0] for places, is_wrong in described if is_wrong] == [f"e-{field.removeprefix('spec.')}"]


def test_an_error_is_explained_without_the_name_of_an_exception(operator: Browser) -> None:
    checked = operator.send("/runs/new/check", method="ssd", **{"spec.model.projector": "null"})
    assert 'data-text="pd distils a projector&#39;s output into its input' in checked.text
    refused = operator.send("/runs/new", method="ssd", **{"spec.model.projector": "null"})
    assert "Value error" not in checked.text + refused.text


def test_valid_settings_are_reported_as_valid(viewer: Browser) -> None:
    assert (
        "These settings are valid"
        in viewer.send("/runs/new/check", method="flesd", **{"spec.public_data.dataset": "x"}).text
    )
    assert viewer.send("/runs/new/check", method="nonsense").status_code == 404


def test_the_form_can_start_from_a_template(shared_coordinator: Coordinator, operator: Browser) -> None:
    for name in ("quick", "ssd"):
        page = operator.get(f"/runs/new?template={name}")
        assert "These settings are valid" in page.text, name
        assert RunSpec.model_validate(_given(page.text)).name != "unnamed"
    paper = cell("ssd-1", "SSD", "cifar10-k10").spec.model_copy(update={"partition": None, "evaluation": None})
    assert RunSpec.model_validate(_given(page.text)) == paper
    assert operator.get("/runs/new?template=nothing").status_code == 404


def test_no_field_of_any_form_expects_json() -> None:
    for method in METHOD_CONFIGS:
        fields = [field for section in spec_form.sections(method) for field in all_fields(section.fields)]
        assert {field.key for field in fields if field.kind == "encoders"} <= {
            "method.reducer.distillation.client_encoders"
        }


def test_a_form_has_every_section_of_a_spec_with_whole_sentences() -> None:
    for method in METHOD_CONFIGS:
        sections = spec_form.sections(method)
        assert {key.partition(".")[0] for section in sections for key in section.keys} == set(RunSpec.model_fields)
        options = [option for section in sections for one in all_fields(section.fields) for option in one.options]
        assert [each.name for each in [*sections, *options] if each.description[-1:] not in ("", ".")] == []


def test_clients_are_picked_by_name(shared_coordinator: Coordinator, operator: Browser) -> None:
    shared_coordinator.worker("picked")
    page = operator.get("/runs/new").text
    assert 'name="client.picked"' in page
    fields = {"client.picked": "on", "spec.cohort.clients": "later-1 later-2"}
    checked = operator.send("/runs/new/check", method="ssd", **fields)
    assert "These settings are valid" in checked.text  # they are not added to another list
    assert _given(checked.text)["cohort"]["clients"] == ["picked", "later-1", "later-2"]
    shown = operator.send("/runs/new/settings", method="fedbyol", **fields).text
    assert re.search(r'name="client.picked"\s+value="on" checked', shown)
    assert 'value="later-1, later-2"' in shown


def test_add_ons_are_chosen_on_cards_with_their_own_settings(operator: Browser) -> None:
    hidden = {"spec.method.add_ons": "dsr,pd"}
    checked = operator.send("/runs/new/check", method="ssd", **hidden)
    assert _given(checked.text)["method"] == {"name": "ssd", "add_ons": []}
    chosen = {"spec.method.add_ons.pd": "on", "spec.method.add_ons.fur": "on", "spec.method.add_ons.fur.weight": "0.5"}
    add_ons = _given(operator.send("/runs/new/check", method="ssd", **hidden, **chosen).text)["method"]["add_ons"]
    assert [(each["name"], each.get("weight")) for each in add_ons] == [("pd", None), ("fur", 0.5)]
    wrong = {**hidden, "spec.method.add_ons.fur": "on", "spec.method.add_ons.fur.weight": "-1"}
    assert 'data-key="method.add_ons.fur.weight"' in operator.send("/runs/new/check", method="ssd", **wrong).text


def test_the_estimate_lists_the_clients_that_are_left_out(
    shared_coordinator: Coordinator, operator: Browser, viewer: Browser, tables: Tables
) -> None:
    shared_coordinator.worker("grey")
    tables.execute("UPDATE clients SET methods = %s WHERE id = 'grey'", Jsonb({"fedbyol": 1}))
    text = operator.send("/runs/new/check", method="ssd").text
    assert "Clients that would take part" in text
    assert "its worker lacks ssd" in text
    assert "<b>grey</b>" in text
    assert 'id="estimate"' not in viewer.send("/runs/new/check", method="ssd").text


def test_a_spec_without_a_plan_is_reported_at_its_field(shared_coordinator: Coordinator, operator: Browser) -> None:
    for requested in redis_connection().scan_iter("fedssl:plan-of:*"):  # by other tests, for whom none was computed
        redis_connection().delete(requested)
    fields = {"method": "fedsimclr", "spec.model.trainable": "layer9.*"}
    assert "being computed" in operator.send("/runs/new/check", **fields).text
    shared_coordinator.compute_plans()
    checked = operator.send("/runs/new/check", **fields).text
    assert 'data-key="model.trainable"' in checked
    assert "layer9.*, which matches no parameter of the encoder" in checked
    assert 'id="estimate"' not in checked
    assert operator.send("/runs/new", **fields).status_code == 422


def test_clients_that_cannot_take_part_are_reported_at_their_field(
    shared_coordinator: Coordinator, operator: Browser, tables: Tables
) -> None:
    names = ("old-1", "old-2")
    for name in names:
        shared_coordinator.worker(name)
        tables.execute("UPDATE clients SET methods = %s WHERE id = %s", Jsonb({"fedbyol": 1}), name)
    picked = {f"client.{name}": "on" for name in names}
    answer = operator.send("/runs/new", method="ssd", **picked)
    assert answer.status_code == 422
    for text in (answer.text, operator.send("/runs/new/check", method="ssd", **picked).text):
        assert "1 setting is not valid" in text
        for name in names:
            assert f"{name}: its worker lacks ssd" in text


def test_only_the_clients_field_asks_for_clients(operator: Browser) -> None:
    text = operator.get("/runs/new?method=fedsimclr").text
    assert text.count("Further clients, by name") == 1
    for name in ("Trainable", "Adapt"):
        assert re.search(rf"<label[^>]*>{name}</label>", text), name
