"""How the coordinator, the token and the run are chosen."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast
from uuid import UUID

import pytest

from fedssl.cli.connection.connect import find_run
from fedssl.cli.connection.target import find_target
from fedssl.cli.error_codes import exit_code
from fedssl.cli.errors import NoSuchRun, NoToken, UsageError
from fedssl.cli.exit_codes import NOT_ALLOWED
from fedssl.client import Client
from fedssl.client.environment import Target

URL, OTHER = "http://127.0.0.1:8123", "http://elsewhere:9000"
NOTHING = {"XDG_CONFIG_HOME": "/nonexistent"}  # so that the connections of the user who runs the tests do not count
RUNS = [UUID("aaaa1111-0000-4000-8000-000000000000"), UUID("aaaa2222-0000-4000-8000-000000000000")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a local federation, with its port and its operator's token."""
    root = tmp_path / ".fedssl"
    (root / "tokens").mkdir(parents=True)
    (root / "federation.json").write_text(json.dumps({"port": 8123}))
    return secret(root / "tokens" / "operator", "local-secret").parents[1]


def secret(path: Path, text: str) -> Path:
    path.write_text(f"{text}\n")
    path.chmod(0o600)
    return path


def test_the_local_federation_is_found(folder: Path) -> None:
    assert find_target(None, None, environment=NOTHING, folder=folder) == Target(URL, "local-secret")


def test_options_override_the_environment_and_the_environment_overrides_the_folder(
    folder: Path, tmp_path: Path
) -> None:
    one, two = secret(tmp_path / "one", "one"), secret(tmp_path / "two", "two")
    environment = {"FEDSSL_URL": OTHER, "FEDSSL_TOKEN": "from-environment", "FEDSSL_TOKEN_FILE": str(two)}

    assert find_target(None, None, environment=environment, folder=folder) == Target(OTHER, "from-environment")
    assert find_target(URL, one, environment=environment, folder=folder) == Target(URL, "one")
    del environment["FEDSSL_TOKEN"]
    assert find_target(None, None, environment=environment, folder=folder) == Target(OTHER, "two")
    environment["FEDSSL_TOKEN"] = ""
    assert find_target(None, None, environment=environment, folder=folder) == Target(OTHER, "two"), "empty is not set"


def test_the_local_token_is_sent_only_to_its_own_coordinator(folder: Path) -> None:
    assert find_target(f"{URL}/", None, environment=NOTHING, folder=folder).token == "local-secret"
    with pytest.raises(NoToken, match="no token for http://elsewhere") as caught:
        find_target(OTHER, None, environment=NOTHING, folder=folder)
    assert exit_code(caught.value) == NOT_ALLOWED


def test_a_federation_that_is_still_starting_is_reported(folder: Path) -> None:
    (folder / "tokens" / "operator").unlink()
    with pytest.raises(UsageError, match=r"has no token yet: wait until `fedssl up` reports"):
        find_target(None, None, environment=NOTHING, folder=folder)
    assert find_target(None, None, environment={"FEDSSL_TOKEN": "own"}, folder=folder).token == "own"


def test_if_nothing_names_a_coordinator_the_error_lists_the_options(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--url.*FEDSSL_URL.*fedssl up"):
        find_target(None, None, environment=NOTHING, folder=tmp_path / ".fedssl")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"port": "x"}', '{"port": null}', "{}"])
def test_a_damaged_record_is_not_used_as_a_federation(folder: Path, text: str) -> None:
    (folder / "federation.json").write_text(text)

    with pytest.raises(UsageError, match="no coordinator"):
        find_target(None, None, environment=NOTHING, folder=folder)


def test_unusable_token_files_are_refused_and_public_ones_cause_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="No such file"):
        find_target(URL, tmp_path / "missing", environment=NOTHING, folder=tmp_path)
    with pytest.raises(UsageError, match="is empty"):
        find_target(URL, secret(tmp_path / "empty", ""), environment=NOTHING, folder=tmp_path)
    open_to_all = secret(tmp_path / "open to all", "x")
    open_to_all.chmod(0o644)
    assert find_target(URL, open_to_all, environment=NOTHING, folder=tmp_path).token == "x"
    assert f"chmod 600 '{open_to_all}'" in capsys.readouterr().err


def test_a_token_file_that_is_a_folder_or_has_no_end_is_refused_without_advice_to_change_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o755)

    with pytest.raises(UsageError, match="Is a directory"):
        find_target(URL, tmp_path, environment=NOTHING, folder=tmp_path)
    with pytest.raises(UsageError, match="larger than any token"):
        find_target(URL, Path("/dev/zero"), environment=NOTHING, folder=tmp_path)

    assert "chmod" not in capsys.readouterr().err


def test_a_targets_repr_hides_its_token() -> None:
    assert "secret" not in repr(Target(URL, "secret"))


class Runs:
    """A coordinator that has two runs."""

    def runs(self) -> Iterator[object]:
        for run_id in RUNS:
            yield type("Summary", (), {"id": run_id})()


@pytest.mark.parametrize("text", ["aaaa1", "AAAA1111", "aaaa1111-0", str(RUNS[0]), RUNS[0].hex])
def test_a_run_is_found_by_the_beginning_of_its_id(text: str) -> None:
    assert find_run(cast("Client", Runs()), text) == RUNS[0]


@pytest.mark.parametrize(
    ("text", "error"), [("aaaa", NoSuchRun), ("bbbb", NoSuchRun), ("aaa", UsageError), ("demo", UsageError)]
)
def test_an_ambiguous_or_unknown_prefix_of_a_run_is_refused(text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        find_run(cast("Client", Runs()), text)
