"""The command `fedssl method show --spec` prints a whole spec for each method that the papers' tables train."""

import json

import pytest
from typer.testing import CliRunner

from fedssl.cli.main import app
from fedssl.cli.specs import read_spec
from fedssl.experiments import papers
from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.protocol.runs import RunSpec

WITHOUT_A_PAPER = {
    "classifier", "fedbarlow", "feddino", "fedmae", "fedprox", "fedvicreg", "orchestra", "ridge-probe", "scaffold",
}  # fmt: skip
"""None of the five papers' tables trains these by themselves."""

SHOWN = sorted(METHOD_CONFIGS.keys() - WITHOUT_A_PAPER)


def read_back(text: str, monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdin.read", lambda: text)
        return read_spec("-")


@pytest.mark.parametrize("name", SHOWN)
def test_the_shown_spec_is_read_back_as_a_run_of_the_tables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["method", "show", name, "--spec"])

    assert result.exit_code == 0, result.output
    first = result.stdout.splitlines()[0]
    (cell,) = papers.select(first.removeprefix("# "))
    shown = read_back(result.stdout, monkeypatch)
    assert shown.method.name == name
    renamed = cell.spec.model_dump(mode="json")
    renamed["method"]["name"] = name
    assert shown == RunSpec.model_validate(renamed)
    for note in cell.notes:
        assert f"# {note}\n" in result.stdout


def test_only_fedx_is_a_preset_that_its_table_lists_as_parts() -> None:
    found = {name: papers.method_cell(name) for name in SHOWN}

    names = {name: papers.select(cell.name)[0].spec.method.name for name, cell in found.items() if cell is not None}
    assert {name: other for name, other in names.items() if name != other} == {"fedx": "fedsimclr"}


def test_the_shown_spec_as_json_is_the_same_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    text = CliRunner().invoke(app, ["method", "show", "ssd", "--spec"]).stdout
    document = json.loads(CliRunner().invoke(app, ["method", "show", "ssd", "--spec", "--format", "json"]).stdout)

    assert RunSpec.model_validate(document) == read_back(text, monkeypatch)


def test_the_shown_spec_has_the_settings_of_the_paper() -> None:
    document = json.loads(CliRunner().invoke(app, ["method", "show", "fedrlc", "--spec", "--format", "json"]).stdout)

    assert document["num_rounds"] == 100
    assert document["model"]["encoder"]["name"] == "resnet18"
    assert document["model"]["projector"]["hidden_dims"] == [4096]
    assert document["model"]["projector"]["out_dim"] == 2048
    assert document["training"]["local_epochs"] == 5
    assert document["training"]["optimizer"]["learning_rate"] == 0.032
    assert document["method"]["add_ons"][0]["num_centers"] == 10
    assert document["partition"]["scheme"] == "classes"


def test_the_shown_spec_of_flesd_states_how_its_public_images_differ() -> None:
    text = CliRunner().invoke(app, ["method", "show", "flesd", "--spec"]).stdout

    assert "# here the public images are drawn from all training images, not those of client-0: " in text


def test_simulate_accepts_a_shown_spec_on_standard_input() -> None:
    text = CliRunner().invoke(app, ["method", "show", "fedx", "--spec"]).stdout
    change = ["--set", "partition.dataset=digits", "--set", "evaluation=null"]

    result = CliRunner().invoke(app, ["simulate", "-", "--dry-run", *change], input=text)

    assert result.exit_code == 0, result.output
    assert "100" in result.stdout


@pytest.mark.parametrize("name", sorted(WITHOUT_A_PAPER))
def test_a_method_without_a_table_has_no_spec_to_show(name: str) -> None:
    result = CliRunner().invoke(app, ["method", "show", name, "--spec"])

    assert result.exit_code == 2
    assert f"none of the papers' tables trains {name} by itself" in result.stderr


@pytest.mark.parametrize("other", ["--remote", "--all"])
def test_a_spec_is_shown_only_for_the_local_installation(other: str) -> None:
    result = CliRunner().invoke(app, ["method", "show", "ssd", "--spec", other])

    assert result.exit_code == 2
    assert "leave out --remote and --all" in result.stderr


def test_the_table_of_methods_builds_no_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("fedssl.cli.methods._document")  # takes a second of processor time for all methods
    result = CliRunner().invoke(app, ["method", "ls"])
    assert result.exit_code == 0, result.output
    assert "fedbyol" in result.stdout
