"""The imports of each process, and the settings that each needs to start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SETTINGS = {
    "FEDSSL_DATABASE_URL": "postgresql+psycopg://nobody@127.0.0.1:1/none",
    "FEDSSL_REDIS_URL": "redis://127.0.0.1:1/0",
}

_API = """
from fedssl_coordinator.app import create_app
create_app()
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


@pytest.mark.full(but=1)
@pytest.mark.parametrize(
    ("code", "unwanted"),
    [(_API, _COMPUTES), (_BEAT, _COMPUTES | _ANSWERS), (_IDLE_QUEUE, _COMPUTES)],
    ids=["api", "beat", "idle queue"],
)
def test_a_process_imports_only_what_it_uses(tmp_path: Path, code: str, unwanted: set[str]) -> None:
    """Only an aggregator with work imports torch. Beat only sends messages, and imports no database driver."""
    environment = {**os.environ, **SETTINGS, "FEDSSL_STORE_PATH": str(tmp_path / "store")}
    command = [sys.executable, "-c", code + "\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    modules = set(json.loads(done.stdout))
    assert not modules & unwanted
    assert "fedssl_coordinator.aggregator.rounds" not in modules


def _command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    bare = {name: value for name, value in os.environ.items() if not name.startswith("FEDSSL_")}
    return subprocess.run(
        [sys.executable, "-m", "fedssl_coordinator", *arguments],
        env={**bare, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_committed_openapi_document_equals_that_of_the_code() -> None:
    """The command needs no settings, prints the same on every machine, and does not import computing packages."""
    done = _command("openapi", PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0, done.stderr
    committed = (ROOT / "openapi.json").read_text(encoding="utf-8")
    assert done.stdout == committed, "regenerate it: make docs"
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "fedssl_coordinator.app" in modules
    assert not modules & {*_COMPUTES, "fedssl_coordinator.aggregator.rounds"}


def test_a_process_without_settings_names_the_missing_one() -> None:
    done = _command("migrate")
    assert done.returncode != 0
    assert "FEDSSL_DATABASE_URL must be set" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--role", "worker"),
        pytest.param(("--role", "root"), marks=pytest.mark.full),
        pytest.param(("--role", "worker", "--client", "No Name"), marks=pytest.mark.full),
        ("--role", "viewer", "--expires", "soon"),
    ],
)
def test_an_invalid_token_request_is_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = _command("token", "create", *arguments, **SETTINGS, FEDSSL_STORE_PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")


def test_an_unknown_queue_is_refused(tmp_path: Path) -> None:
    done = _command("aggregator", "--queues", "aggregate,distil", **SETTINGS, FEDSSL_STORE_PATH=str(tmp_path))
    assert done.returncode == 2
    assert "'distil' is not a queue: use aggregate, distill, evaluate" in " ".join(done.stderr.split())


def test_help_explains_the_queues() -> None:
    done = _command("aggregator", "--help")
    for word in ("aggregate", "distill", "evaluate", "FEDSSL_DEVICE", "one task at a time"):
        assert word in done.stdout


@pytest.mark.full(but=1)
@pytest.mark.parametrize(("name", "value"), [("DEVICE", "gpu"), ("DEVICE", "cuda:x"), ("CHECKPOINT_SECONDS", "-1")])
def test_an_invalid_setting_is_named(tmp_path: Path, name: str, value: str) -> None:
    done = _command("migrate", **SETTINGS, FEDSSL_STORE_PATH=str(tmp_path), **{f"FEDSSL_{name}": value})
    assert done.returncode != 0
    assert f"FEDSSL_{name}: " in done.stderr
