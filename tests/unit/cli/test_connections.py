"""Named coordinators: the file, the commands, and which setting wins if several name a coordinator."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedssl.cli.connection.file import connections_path
from fedssl.cli.connection.target import find_target
from fedssl.cli.errors import UsageError
from fedssl.cli.main import app
from fedssl.client.environment import Target
from support.commands import fedssl

NOT_UTF8 = b"token-\xff".decode(errors="surrogateescape")
ONE, TWO = "https://one.example", "https://two.example"


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder of a user without a coordinator. It has two token files."""
    for name in ("FEDSSL_URL", "FEDSSL_TOKEN", "FEDSSL_TOKEN_FILE", "FEDSSL_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"secret-{name}\n")
        (tmp_path / name).chmod(0o600)
    return tmp_path


def target(connection: str | None = None, **environment: str) -> Target:
    config = str(connections_path().parents[1])
    return find_target(None, None, connection=connection, environment={"XDG_CONFIG_HOME": config, **environment})


@pytest.fixture
def two_connections(working_folder: Path) -> None:
    """Add `one`, which is in use and whose token stays in its file, and `two`, which keeps a copy of its token."""
    assert fedssl("connection", "add", "one", ONE, "--token-file", "one").exit_code == 0
    assert fedssl("connection", "add", "two", TWO, "--token-file", "two", "--copy-token").exit_code == 0


def test_connections_are_added_listed_used_and_removed(two_connections: None, working_folder: Path) -> None:
    assert connections_path().stat().st_mode & 0o777 == 0o600
    text = connections_path().read_text()
    assert ("secret-one" in text, "secret-two" in text) == (False, True)
    listed = json.loads(fedssl("connection", "ls", "--format", "json").stdout)
    assert [(row["name"], row["url"], row["token"], row["current"]) for row in listed] == [
        ("one", ONE, str(working_folder / "one"), True),
        ("two", TWO, "kept here", False),
    ]
    assert "secret" not in fedssl("connection", "ls").output
    assert fedssl("connection", "use", "two").exit_code == 0
    assert target() == Target(TWO, "secret-two")
    assert fedssl("connection", "rm", "two").exit_code == 0
    with pytest.raises(UsageError, match="no coordinator"):
        target()


def test_the_connection_option_overrides_the_environment_and_the_connection_in_use(two_connections: None) -> None:
    assert target() == Target(ONE, "secret-one")
    assert target(FEDSSL_CONNECTION="two") == Target(TWO, "secret-two")
    assert target(FEDSSL_CONNECTION="two", FEDSSL_TOKEN="mine") == Target(TWO, "mine")
    assert target(FEDSSL_CONNECTION="two", FEDSSL_URL=ONE, FEDSSL_TOKEN="mine") == Target(ONE, "mine")
    assert target("two", FEDSSL_CONNECTION="one", FEDSSL_URL=ONE, FEDSSL_TOKEN="mine") == Target(TWO, "secret-two")
    with pytest.raises(UsageError, match="no token"):
        target(FEDSSL_URL="https://elsewhere.example")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["add", "one", ONE], "there is a connection 'one'"),
        (["add", "No", ONE], "NAME: 'No' cannot name a connection: use at most 63 lower-case letters"),
        (["add", "three", ONE, "--token-file", NOT_UTF8], "--token-file: a path that is not UTF-8 cannot be stored"),
        (["add", "three", "ftp://x"], "URL: The coordinator's address must be"),
        (["add", "three", ONE, "--token-file", "missing"], "No such file"),
        (["add", "three", ONE, "--copy-token"], "needs --token-file"),
        (["use", "three"], "known: one, two"),
        (["rm", "three"], "fedssl connection add"),
    ],
)
def test_impossible_changes_of_connections_are_refused(two_connections: None, arguments: list[str], said: str) -> None:
    before = connections_path().read_text()
    Path(NOT_UTF8).write_text("secret")
    result = fedssl("connection", *arguments)
    assert (result.exit_code, said in result.stderr) == (2, True), result.output
    assert connections_path().read_text() == before


def test_a_damaged_file_is_named(working_folder: Path) -> None:
    connections_path().parent.mkdir(parents=True)
    connections_path().write_text('{"connections": {"one": {"url": 7, "token": "secret"}}}')
    result = fedssl("connection", "ls")
    assert (result.exit_code, str(connections_path()) in result.stderr) == (2, True)
    assert "secret" not in result.output


def test_the_connection_option_is_accepted_before_and_after_the_command(two_connections: None) -> None:
    for arguments in (["--connection", "no", "run", "ls"], ["run", "ls", "--connection=no"]):
        result = fedssl(*arguments)
        assert (result.exit_code, "no connection 'no'" in result.stderr) == (2, True), result.output


def test_the_shell_completes_names_and_methods(two_connections: None) -> None:
    for line, offered in (("fedssl connection use t", "two"), ("fedssl method show fedby", "fedbyol")):
        shell = {"_FEDSSL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
        assert CliRunner().invoke(app, [], prog_name="fedssl", env=shell).stdout.split() == [offered]
