"""The imports of each process, and the settings that each needs to start."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fedssl_coordinator.main import app
from support.coordinator import clear_caches

ROOT = Path(__file__).parents[3]
SETTINGS = {
    "FEDSSL_DATABASE_URL": "postgresql+psycopg://nobody@127.0.0.1:1/none",
    "FEDSSL_REDIS_URL": "redis://127.0.0.1:1/0",
}

_API = """
import os
from fedssl_coordinator.main import app
app(["openapi"], standalone_mode=False)
os.environ.update(SETTINGS)
from fedssl.protocol.runs import RunSpec
RunSpec.model_validate({"method": {"name": "fedbyol"}})
from fedssl_coordinator.core.store import store
store()
"""
_BEAT = """
from celery.apps.beat import Beat
import fedssl_coordinator.main
from fedssl_coordinator.core.celery_app import app
app.loader.init_worker()  # as beat does when it starts
app.finalize()
Beat(app=app).Service(app, scheduler_cls=app.conf.beat_scheduler).get_scheduler(lazy=True)
assert "fedssl_coordinator.aggregator.beat" in __import__("sys").modules
"""
_IDLE_QUEUE = """
import fedssl_coordinator.aggregator.tasks
from fedssl_coordinator.core.celery_app import app
scheduled = {entry["task"] for entry in app.conf.beat_schedule.values()}
assert scheduled | {"fedssl.advance_run", "fedssl.compute_plan", "fedssl.distil", "fedssl.evaluate"} <= app.tasks.keys()
route = app.amqp.router.route
assert route({}, "fedssl.distil")["queue"].name == "distill"
assert route({}, "fedssl.evaluate")["queue"].name == "evaluate"
assert route({}, "fedssl.advance_run")["queue"].name == route({}, "fedssl.sweep")["queue"].name == "aggregate"
assert app.conf.beat_schedule["sweep"]["task"] == "fedssl.sweep"
"""
_COMPUTES = {"torch", "torchvision", "safetensors", "sklearn", "matplotlib", "PIL"}
_ANSWERS = {"sqlalchemy", "psycopg", "fastapi", "numpy", "fedssl_coordinator.aggregator.tasks"}


def _without_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("FEDSSL_")}


def _run(code: str, environment: dict[str, str]) -> tuple[str, set[str]]:
    """Return what the code prints in a new interpreter, and which modules it has imported."""
    command = [sys.executable, "-c", code + "\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    *lines, modules = done.stdout.splitlines(keepends=True)
    return "".join(lines), set(json.loads(modules))


def test_the_api_does_not_import_computing_packages_and_its_openapi_document_is_committed(tmp_path: Path) -> None:
    """The document needs no settings, and is the same on every machine."""
    settings = {**SETTINGS, "FEDSSL_STORE_PATH": str(tmp_path / "store")}
    document, modules = _run(f"SETTINGS = {settings}\n{_API}", _without_settings())
    assert document == (ROOT / "openapi.json").read_text(encoding="utf-8"), "regenerate it: make docs"
    assert "fedssl_coordinator.app" in modules
    assert not modules & {*_COMPUTES, "fedssl_coordinator.aggregator.rounds"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("code", "unwanted"),
    [(_BEAT, _COMPUTES | _ANSWERS), (_IDLE_QUEUE, _COMPUTES)],
    ids=["beat", "idle queue"],
)
def test_a_process_imports_only_what_it_uses(tmp_path: Path, code: str, unwanted: set[str]) -> None:
    """Only an aggregator with work imports torch. Beat only sends messages, and imports no database driver."""
    _, modules = _run(code, {**os.environ, **SETTINGS, "FEDSSL_STORE_PATH": str(tmp_path / "store")})
    assert not modules & unwanted
    assert "fedssl_coordinator.aggregator.rounds" not in modules


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    """Yield `command("migrate", DEVICE="gpu")`, which runs a command in this process, with these settings only."""
    for name in os.environ:
        if name.startswith("FEDSSL_"):
            monkeypatch.delenv(name)
    # Configuring logging would affect the whole process: loggers keep the configuration of their first use.
    monkeypatch.setattr("fedssl_coordinator.core.logs.configure_logging", lambda: None)

    def run(*arguments: str, **settings: str) -> Result:
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        return CliRunner().invoke(app, arguments)

    clear_caches()
    yield run
    clear_caches()


def test_a_process_without_settings_names_the_missing_one() -> None:
    migrate = [sys.executable, "-m", "fedssl_coordinator", "migrate"]
    done = subprocess.run(migrate, env=_without_settings(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "FEDSSL_DATABASE_URL must be set" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--role", "worker"),
        ("--role", "root"),
        ("--role", "worker", "--client", "No Name"),
        ("--role", "viewer", "--expires", "soon"),
    ],
)
def test_an_invalid_token_request_is_refused(
    command: Callable[..., Result], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    done = command("token", "create", *arguments, **SETTINGS, FEDSSL_STORE_PATH=str(tmp_path))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")


def test_an_unknown_queue_is_refused(command: Callable[..., Result], tmp_path: Path) -> None:
    done = command("aggregator", "--queues", "aggregate,distil", **SETTINGS, FEDSSL_STORE_PATH=str(tmp_path))
    assert done.exit_code == 2
    assert "'distil' is not a queue: use aggregate, distill, evaluate" in " ".join(done.stderr.split())


def test_help_explains_the_queues(command: Callable[..., Result]) -> None:
    done = command("aggregator", "--help")
    for word in ("aggregate", "distill", "evaluate", "FEDSSL_DEVICE", "one task at a time"):
        assert word in done.stdout


@pytest.mark.parametrize(("name", "value"), [("DEVICE", "gpu"), ("DEVICE", "cuda:x"), ("CHECKPOINT_SECONDS", "-1")])
def test_an_invalid_setting_is_named(command: Callable[..., Result], tmp_path: Path, name: str, value: str) -> None:
    done = command("migrate", **SETTINGS, FEDSSL_STORE_PATH=str(tmp_path), **{f"FEDSSL_{name}": value})
    assert done.exit_code != 0
    assert f"FEDSSL_{name}: " in done.stderr
