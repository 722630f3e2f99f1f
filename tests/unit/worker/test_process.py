"""The worker as a process: its command line, its logs, and how it ends."""

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs
from typer.testing import CliRunner

from fedssl.liveness import why_not_ready
from fedssl.protocol.model import EncoderConfig
from fedssl_worker import main
from fedssl_worker.bootstrap import EXIT_REFUSED, run_worker
from fedssl_worker.files import exclusive_folder
from fedssl_worker.main import app
from fedssl_worker.settings import Settings, SettingsError, read_settings
from support.preloaded import Forked, preloaded
from support.waiting import wait_until

from .conftest import WorkerHarness, make_spec, write_images
from .coordinator import TOKEN, FakeCoordinator, Refusal


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("FEDSSL_WORKER_"):
            monkeypatch.delenv(name)


@contextmanager
def worker(coordinator: FakeCoordinator, folder: Path, token: str = TOKEN) -> Iterator[subprocess.Popen[str]]:
    write_images(folder / "own.npz")
    (folder / "token").write_text(token + "\n")
    (folder / "token").chmod(0o600)
    arguments = ["--coordinator", coordinator.url, "--data", str(folder / "own.npz"), "--state", str(folder / "state")]
    process = subprocess.Popen(
        [sys.executable, "-m", "fedssl_worker", "run", *arguments, "--token-file", str(folder / "token")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def terminate(process: subprocess.Popen[str], number: signal.Signals) -> str:
    asked = time.monotonic()
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert time.monotonic() - asked < 4  # 2 s, and twice that on a busy machine
    assert process.returncode == 0, output
    assert TOKEN not in output
    assert "Traceback" not in output
    return output


@pytest.mark.full
def test_a_worker_can_be_stopped_while_it_waits_and_while_it_trains(
    coordinator: FakeCoordinator, harness: WorkerHarness
) -> None:
    folder = harness.folder / "worker"
    folder.mkdir()
    endless = make_spec(training={"batch_size": 8, "local_epochs": 10_000})
    with worker(coordinator, folder) as process:
        wait_until(lambda: coordinator.introductions, 60)
        harness.offer(make_spec(), 1)
        wait_until(lambda: coordinator.submissions, 60)
        time.sleep(0.2)  # it waits for work again
        lines = [json.loads(line) for line in terminate(process, signal.SIGINT).splitlines()]
    assert [line["event"] for line in lines[1:]] == [
        "worker.registered",
        "work.claimed",
        "work.trained",
        "update.submitted",
    ]
    assert lines[2]["round"] == 1
    with worker(coordinator, folder) as process:
        harness.offer(endless, 2)
        wait_until(lambda: process.poll() or any(b.progress and b.progress.step for b in coordinator.heartbeats), 60)
        terminate(process, signal.SIGTERM)
    assert coordinator.leased is not None  # the lease stays for the worker that is started next
    assert coordinator.declined == []


def test_a_refused_worker_logs_the_reason(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    def revoke(call: str) -> None:
        raise Refusal("unauthenticated", 401, "The token was revoked: ask the operator for a new one.")

    coordinator.before = revoke
    data = str(write_images(tmp_path / "own.npz"))
    settings = Settings(coordinator=coordinator.url, data=data, state=tmp_path / "state", token=SecretStr(TOKEN))
    with capture_logs() as logs:
        assert run_worker(settings) == EXIT_REFUSED
    assert "ask the operator for a new one" in logs[-1]["reason"]
    assert TOKEN not in repr(logs)


@contextmanager
def unhealthy_worker(coordinator: FakeCoordinator, folder: Path, **variables: str) -> Iterator[Forked]:
    """Yield a worker as compose starts it. It has a liveness file, and keeps running if it cannot work."""
    variables = {
        "FEDSSL_WORKER_COORDINATOR": coordinator.url,
        "FEDSSL_WORKER_DATA": str(write_images(folder / "own.npz")),
        "FEDSSL_WORKER_STATE": str(folder / "state"),
        "FEDSSL_WORKER_TOKEN": TOKEN,
        "FEDSSL_LIVENESS_FILE": str(folder / "alive"),
        "FEDSSL_STAY_UNHEALTHY": "true",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    with (folder / "log").open("wb") as log:
        process = preloaded().start("fedssl_worker", ["run"], os.environ | variables, log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def output_until_unhealthy(folder: Path) -> str:
    wait_until(lambda: "then start the worker again" in (folder / "log").read_text(), 60)
    return (folder / "log").read_text()


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("FEDSSL_WORKER_DATA", "/no/such/images", "/no/such/images"),
        ("FEDSSL_WORKER_COORDINATOR", "", "--coordinator: must be given"),
        pytest.param(
            "FEDSSL_WORKER_COORDINATOR",
            "http://fed.example",
            "over http the token would be readable on the way",
            marks=pytest.mark.full,
        ),
        pytest.param("FEDSSL_WORKER_POLICY", "/no/policy.toml", "cannot read the policy", marks=pytest.mark.full),
    ],
)
def test_a_worker_keeps_running_unready_after_an_error_that_a_restart_would_repeat(
    coordinator: FakeCoordinator, tmp_path: Path, variable: str, value: str, reason: str
) -> None:
    with unhealthy_worker(coordinator, tmp_path, **{variable: value}) as process:
        output = output_until_unhealthy(tmp_path)
        found = why_not_ready(tmp_path / "alive")
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 2
    assert found is not None
    assert reason in found
    assert reason in output
    assert TOKEN not in output + found


@pytest.mark.full
def test_a_worker_is_ready_while_the_coordinator_answers(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    with unhealthy_worker(
        coordinator, tmp_path, FEDSSL_WORKER_RETRY_SECONDS="0.1", FEDSSL_WORKER_CLAIM_SECONDS="0.2"
    ) as process:
        wait_until(alive.exists, 60)
        assert why_not_ready(alive, 60) is None
        assert coordinator.introductions

        def be_down(call: str) -> None:
            raise Refusal("internal", 503, "The database is down.")

        coordinator.before = be_down
        wait_until(lambda: why_not_ready(alive) is not None, 60)
        coordinator.before = lambda call: None
        wait_until(lambda: why_not_ready(alive) is None, 60)

        def revoke(call: str) -> None:
            raise Refusal("unauthenticated", 401, "The token was revoked: ask the operator for a new one.")

        coordinator.before = revoke
        assert "ask the operator for a new one" in output_until_unhealthy(tmp_path)
        assert "ask the operator for a new one" in (why_not_ready(alive) or "")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == EXIT_REFUSED


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["run", *arguments])
    return result.exit_code, result.output


def test_missing_and_invalid_settings_are_reported() -> None:
    code, output = invoke("--device", "tpu")
    assert code == 2
    assert "--coordinator: must be given" in output
    assert "--device" in output


def test_a_metrics_port_in_use_is_reported(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    port = coordinator.url.rpartition(":")[2]
    given = ("--coordinator", coordinator.url, "--data", "digits", "--state", str(tmp_path / "state"))
    code, output = invoke(*given, "--metrics-port", port)
    assert code == 2
    assert f"cannot serve metrics at 127.0.0.1, port {port} (Address already in use): choose another" in output


def test_an_empty_variable_is_not_a_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If a deployment sets the variable of a secret to nothing, the worker still uses the token in its file."""
    monkeypatch.setenv("FEDSSL_WORKER_TOKEN", "")
    monkeypatch.setenv("FEDSSL_WORKER_ENROLMENT_TOKEN", " ")
    given = {"coordinator": "http://127.0.0.1:1", "data": "digits", "state": tmp_path}
    settings = Settings.model_validate(given)
    assert settings.read_token() is None
    assert settings.read_enrolment_token() is None
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    settings = Settings.model_validate({**given, "token_file": file, "enrolment_token_file": file})
    assert settings.read_token() == settings.read_enrolment_token() == TOKEN


def test_a_token_is_required_and_its_file_must_be_private(tmp_path: Path) -> None:
    given = ("--coordinator", "http://127.0.0.1:1", "--data", "digits", "--state", str(tmp_path / "state"))
    code, output = invoke(*given)
    assert code == 2
    assert "FEDSSL_WORKER_TOKEN" in output
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o644)
    code, output = invoke(*given, "--token-file", str(token))
    assert code == 2
    assert "chmod 600" in output
    assert "secret" not in output


def test_settings_are_also_read_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDSSL_WORKER_TOKEN", TOKEN)
    monkeypatch.setenv("FEDSSL_WORKER_THREADS", "2")
    settings = Settings(coordinator="http://127.0.0.1:1", data="digits", state=tmp_path)
    assert settings.threads == 2
    assert settings.read_token() == TOKEN
    assert TOKEN not in repr(settings)


_VARIABLES: dict[str, tuple[str, object]] = {
    "coordinator": ("https://fed.example", "https://fed.example"),
    "data": ("pets", "pets"),
    "labels": ("own", "own"),
    "label_names": ("/names.csv", Path("/names.csv")),
    "state": ("/state", Path("/state")),
    "enrolment_token_file": ("/enrolment", Path("/enrolment")),
    "token_file": ("/token", Path("/token")),
    "ca_file": ("/ca.pem", Path("/ca.pem")),
    "client_cert": ("/cert.pem", Path("/cert.pem")),
    "client_key": ("/key.pem", Path("/key.pem")),
    "insecure_http": ("1", True),
    "device": ("cpu", "cpu"),
    "gpus": ("4", 4),
    "threads": ("2", 2),
    "image_size": ("32", 32),
    "channels": ("3", 3),
    "max_unreadable": ("0.05", 0.05),
    "no_image_cache": ("1", True),
    "rescan": ("1", True),
    "public_data": ("/public", Path("/public")),
    "max_public_bytes": ("5", 5),
    "max_artifact_bytes": ("6", 6),
    "encoder": ("resnet18", EncoderConfig(name="resnet18")),
    "policy": ("/policy.toml", Path("/policy.toml")),
    "claim_seconds": ("1.5", 1.5),
    "retry_seconds": ("2.5", 2.5),
    "keep_ended_seconds": ("60", 60.0),
    "log_level": ("debug", "debug"),
    "metrics_port": ("9100", 9100),
    "metrics_host": ("::1", "::1"),
}


def test_every_option_can_be_set_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(_VARIABLES) == set(inspect.signature(main.run).parameters)
    for name, (text, _) in _VARIABLES.items():
        monkeypatch.setenv(f"FEDSSL_WORKER_{name.upper()}", text)
    settings = read_settings({})
    assert {name: getattr(settings, name) for name in _VARIABLES} == {
        name: value for name, (_, value) in _VARIABLES.items()
    }


def test_every_option_is_read_like_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Settings] = []
    monkeypatch.setattr(main, "_run", lambda settings: read.append(settings) or 0)
    given = [("--" + name.replace("_", "-"), text) for name, (text, _) in _VARIABLES.items()]
    options = [part for option, text in given for part in ((option,) if text == "1" else (option, text))]
    assert invoke(*options) == (0, "")
    assert {name: getattr(read[0], name) for name in _VARIABLES} == {
        name: value for name, (_, value) in _VARIABLES.items()
    }


def test_secrets_are_the_only_settings_without_an_option() -> None:
    options = set(inspect.signature(main.run).parameters)
    assert Settings.model_fields.keys() - options == {"token", "enrolment_token"}


@pytest.mark.parametrize(
    ("option", "text", "words"),
    [
        ("--threads", "many", "valid integer"),
        ("--retry-seconds", "long", "valid"),
        ("--metrics-port", "0", "--metrics-port: Input should be greater than or equal to 1"),
        ("--log-level", "loud", "--log-level: Input should be 'debug', 'info', 'warning' or 'error'"),
    ],
)
def test_an_option_with_an_invalid_value_is_refused(option: str, text: str, words: str) -> None:
    code, output = invoke("--coordinator", "http://127.0.0.1:1", "--data", "digits", "--state", "/state", option, text)
    assert code == 2
    assert words in output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0", "greater than or equal to 1"),
        ("17", "less than or equal to 16"),
        ("grey", "a valid integer, unable to parse string as an integer"),
    ],
)
def test_an_impossible_number_of_channels_is_refused(monkeypatch: pytest.MonkeyPatch, text: str, words: str) -> None:
    monkeypatch.setenv("FEDSSL_WORKER_CHANNELS", text)
    code, output = invoke("--coordinator", "http://127.0.0.1:1", "--data", "digits", "--state", "/state")
    assert (code, output.strip()) == (2, f"fedssl-worker: --channels: Input should be {words}")


def test_a_state_folder_serves_one_worker_at_a_time(tmp_path: Path) -> None:
    with exclusive_folder(tmp_path / "state") as folder:
        assert folder.stat().st_mode & 0o077 == 0
        with pytest.raises(SettingsError, match="another worker"), exclusive_folder(tmp_path / "state"):
            pass
    with exclusive_folder(tmp_path / "state"):
        pass


def test_help_explains_files_and_exit_codes_without_importing_torch() -> None:
    script = (
        "import sys; from typer.testing import CliRunner; from fedssl_worker.main import app; "
        "print(CliRunner().invoke(app, ['run', '--help']).output, 'torch' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output.strip().endswith("False")
    for word in ("FEDSSL_WORKER_TOKEN", "STATE/ledger", "--policy", "Exit codes", "--token-file"):
        assert word in output
