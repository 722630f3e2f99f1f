"""The option `--help` is quick because it imports almost nothing, and it explains what a newcomer needs."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fedssl.cli.exit_codes import EXIT_CODES
from fedssl.cli.main import app
from fedssl.protocol.methods import METHOD_CONFIGS

HEAVY = ("torch", "numpy", "httpx", "pydantic", "rich", "yaml", "safetensors", "matplotlib", "sklearn")


def imported_by(*arguments: str) -> set[str]:
    """Run a command in a separate process, and return the top-level modules that were imported when it ended."""
    source = (
        "import sys\nfrom fedssl.cli.main import app\n"
        f"try:\n    app({list(arguments)!r})\n"
        "finally:\n    print('IMPORTED', *{name.partition('.')[0] for name in sys.modules})\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("IMPORTED")[2].split())


@pytest.mark.full(but=1)
@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    assert imported_by(*arguments).isdisjoint(HEAVY)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("arguments", [["run", "submit", "--help"], ["run", "--help"], ["demo", "--help"]])
def test_help_of_a_command_imports_nothing_heavy_except_pydantic(arguments: list[str]) -> None:
    assert imported_by(*arguments).isdisjoint(set(HEAVY) - {"pydantic"})


@pytest.mark.full(but=1)
@pytest.mark.parametrize("arguments", [["method", "show", "fedbyol"], ["method", "ls"]])
def test_showing_methods_needs_neither_torch_nor_a_coordinator(arguments: list[str]) -> None:
    assert imported_by(*arguments).isdisjoint({"torch", "numpy", "httpx"})


def test_help_documents_the_exit_codes_and_the_connection() -> None:
    printed = CliRunner().invoke(app, ["--help"]).stdout
    text = " ".join(printed.split())

    for code, meaning in EXIT_CODES.items():
        assert f"{code:>4}  {meaning}\n" in printed
    for word in ("FEDSSL_URL", "FEDSSL_CONNECTION", "FEDSSL_TOKEN_FILE", "FEDSSL_TOKEN", ".fedssl", "--format json"):
        assert word in text


ON_THE_COORDINATOR = ("state", "dimensions", "distillations", "cancel-distillation")
LOOKING = ("rounds", "metrics")
STEERING = ("submit", "ls", "show", "watch", "wait", "start", "pause", "resume", "stop", "continue", "pull", "logs")
GROUPS = {
    "run": (*STEERING, *LOOKING, *ON_THE_COORDINATOR),
    "artifact": ("get",),
    "connection": ("add", "ls", "use", "rm"),
    "method": ("ls", "show"),
    "client": ("ls", "show", "revoke"),
    "data": ("ls", "fetch"),
    "token": ("create", "ls"),
    "public-dataset": ("add", "ls", "show"),
    "evaluation-dataset": ("add", "ls", "show"),
    "weights": ("add", "check", "ls", "show", "remove"),
}
COMMANDS = [
    ["demo"],
    ["doctor"],
    ["up"],
    ["simulate"],
    ["compare"],
    ["reproduce"],
    ["evaluate"],
    ["partition"],
    *([group, name] for group in GROUPS for name in GROUPS[group]),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself_and_can_write_json(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])

    assert result.exit_code == 0
    assert f"fedssl {' '.join(command)}" in result.stdout
    assert "--format" in result.stdout


def test_the_parameters_of_parts_that_are_not_chosen_are_only_shown_on_request() -> None:
    def shown(*more: str) -> set[str]:
        lines = CliRunner().invoke(app, ["method", "show", "fedbyol", *more]).stdout.splitlines()
        return {line.split()[0] for line in lines if line.startswith(" method.")}

    short, whole = shown(), shown("--all")
    assert whole - short >= {"method.reducer.num_anchors", "method.reducer.batch_size"}, "of FLESD's reducer"
    assert "method.reducer" in short & whole


@pytest.mark.full(but=8)
@pytest.mark.parametrize("name", METHOD_CONFIGS)
def test_every_parameter_of_a_method_is_shown_with_its_default(name: str) -> None:
    result = CliRunner().invoke(app, ["method", "show", name])

    assert result.exit_code == 0, result.output
    shown = {line.split()[0]: line.split()[1] for line in result.stdout.splitlines() if line.startswith(" method.")}
    for field, info in METHOD_CONFIGS[name].model_fields.items():
        assert f"method.{field}" in shown
        if isinstance(info.default, int | float | str):
            assert shown[f"method.{field}"] == str(info.default).lower()
    document = json.loads(CliRunner().invoke(app, ["method", "show", name, "--format", "json"]).stdout)
    assert document["config_schema"]["properties"].keys() == METHOD_CONFIGS[name].model_fields.keys()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fedbyol", "yes"),
        ("orchestra", "yes, except centroids"),
        ("fedu2", "no: method.reducer eua compares each update with every other one"),
    ],
)
def test_method_show_reports_whether_updates_can_be_summed(name: str, expected: str) -> None:
    shown = CliRunner().invoke(app, ["method", "show", name]).stdout
    (line,) = (line for line in shown.splitlines() if line.startswith("can be summed"))
    assert line.removeprefix("can be summed").strip() == expected
    document = json.loads(CliRunner().invoke(app, ["method", "show", name, "--format", "json"]).stdout)
    assert (document["why_not_summed"] is None) == expected.startswith("yes")
    assert document["sent_apart"] == (["centroids"] if name == "orchestra" else [])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fedbyol", "yes"),
        ("orchestra", "yes, except centroids: they leave without masks, if the data owner's policy permits it"),
        ("fedu2", "no: method.reducer eua compares each update with every other one"),
        ("single", "no: single sends no tensors here, so there is no sum"),
    ],
)
def test_method_show_reports_whether_secure_aggregation_is_possible(name: str, expected: str) -> None:
    shown = CliRunner().invoke(app, ["method", "show", name]).stdout
    (line,) = (line for line in shown.splitlines() if line.startswith("secure aggregation"))
    assert line.removeprefix("secure aggregation").strip() == expected
    document = json.loads(CliRunner().invoke(app, ["method", "show", name, "--format", "json"]).stdout)
    assert document["why_not_secure"] == (None if expected.startswith("yes") else expected.removeprefix("no: "))
