"""Commands against a real coordinator: what they print, and their exit codes."""

import json
import os
import socket
import zipfile
from datetime import datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner, Result

from fedssl.artifacts.tensors import load_tensors
from fedssl.cli.main import app
from fedssl.cli.specs import read_spec
from fedssl.client import Client, Retry, RunNotFinished, WorkerClient, model_card
from fedssl.embeddings.encoders import load_model
from fedssl.protocol.data import PartitionConfig
from fedssl.protocol.ledger import LedgerAnchor
from fedssl.protocol.work import Register
from support.commands import Fedssl, json_of
from support.coordinator import Coordinator
from support.federation import deliver, tiny_spec

pytestmark = pytest.mark.integration


@pytest.fixture
def fedssl(coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fedssl:
    """Return a function that runs a command as an admin of the coordinator in an empty folder."""
    token = tmp_path / "token"
    token.write_text(coordinator.admin_token)
    token.chmod(0o600)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSSL_URL", coordinator.url)
    monkeypatch.setenv("FEDSSL_TOKEN_FILE", str(token))

    def run(*arguments: object, text: str | None = None) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=text)

    return run


@pytest.fixture
def spec() -> str:
    """Return the JSON of a spec for one round and at least one client, without its partition."""
    return tiny_spec(name="tiny", num_rounds=1, cohort={"min_clients": 1}).model_dump_json(exclude={"partition"})


def train(coordinator: Coordinator, run: dict[str, Any], folder: Path) -> None:
    """Train a run of one round, acting as its only worker and as the aggregator."""
    worker = coordinator.worker("hospital-a")
    run_id = coordinator.client.run(run["id"]).id
    coordinator.advance(run_id)
    item = worker.claim(0)
    assert item is not None
    deliver(worker, item, folder, value=0.5)
    coordinator.advance(run_id)


def test_contradicting_anchors_of_a_ledger_are_listed(coordinator: Coordinator, fedssl: Fedssl) -> None:
    worker = coordinator.worker("hospital-a")
    for head in "ab":
        worker.heartbeat(anchor=LedgerAnchor(key="0" * 64, seq=1200, head=head * 64))
    listed = json_of(fedssl("client", "anchors", "hospital-a", "--format", "json"))
    assert [(anchor["seq"], anchor["head"], anchor["is_consistent"]) for anchor in listed] == [
        (1200, "a" * 64, True),
        (1200, "b" * 64, False),
    ]
    table = fedssl("client", "anchors", "hospital-a").stdout
    assert "a" * 64 in table
    assert table.count("CONTRADICTS") == 1
    assert fedssl("client", "anchors", "nobody").exit_code == 5


def test_a_run_is_submitted_paused_resumed_and_pulled(
    coordinator: Coordinator, fedssl: Fedssl, spec: str, tmp_path: Path
) -> None:
    created = json_of(fedssl("run", "submit", "-", "--no-start", "--set", "seed=7", "--format", "json", text=spec))
    assert (created["state"], created["spec"]["seed"]) == ("created", 7)
    prefix = created["id"][:6]
    assert json_of(fedssl("run", "start", prefix, "--format", "json"))["state"] == "running"
    assert json_of(fedssl("run", "pause", prefix, "--format", "json"))["state"] == "paused"
    assert json_of(fedssl("run", "resume", prefix, "--format", "json"))["state"] == "running"

    train(coordinator, created, tmp_path)

    assert json_of(fedssl("run", "wait", prefix, "--format", "json"))["outcome"] == "completed"
    watched = fedssl("run", "watch", prefix, "--format", "json")
    assert json_of(watched)["outcome"] == "completed"
    assert watched.stderr == "round 1 of 1: loss 0.5000\n"
    pulled = json_of(fedssl("run", "pull", prefix, "--out", "out", "--format", "json"))
    assert pulled["rounds_closed"] == 1
    assert read_spec(pulled["files"]["spec"]) == coordinator.client.run(created["id"]).spec
    model = load_tensors(Path("out/model.safetensors"))
    assert {float(tensor.double().mean()) for tensor in model.values()} <= {0.0, 0.5}
    assert all(name.startswith("encoder.") for name in load_tensors(Path("out/encoder.safetensors")))
    lineage = json.loads(Path(pulled["files"]["lineage"]).read_text())
    (only,) = coordinator.client.rounds(created["id"])
    assert lineage["rounds"][0]["updates"] == {"hospital-a": only.assignments[0].update}
    assert lineage["rounds"][0]["broadcast"] == lineage["initial_model"] == only.broadcast
    assert lineage["model"] == pulled["sha256"] == sha256(Path("out/model.safetensors").read_bytes()).hexdigest()
    assert lineage["encoder"] == sha256(Path("out/encoder.safetensors").read_bytes()).hexdigest()
    card = Path(pulled["files"]["card"]).read_text()
    for word in ("# tiny", "`fedalignuniform`", "| hospital-a | 10 |", "1 of 1: 1 aggregated", lineage["encoder"]):
        assert word in card
    assert fedssl("run", "pull", prefix, "--initial", "--out", "out").exit_code == 0
    assert Path("out/initial.safetensors").exists()
    assert load_model(Path("out")).sha256 == lineage["encoder"]
    _flip_a_bit(Path("out/encoder.safetensors"))
    damaged = fedssl("export", "out", "--to", "onnx")
    assert damaged.exit_code != 0
    assert "out/encoder.safetensors is not the file that lineage.json next to it lists" in damaged.stderr
    digest = pulled["sha256"]
    _flip_a_bit(coordinator.store / digest[:2] / digest[2:4] / digest)
    assert fedssl("run", "pull", prefix, "--out", "again").exit_code != 0
    assert not Path("again/model.safetensors").exists()


@pytest.mark.full
def test_a_pulled_encoder_is_exported(coordinator: Coordinator, fedssl: Fedssl, spec: str, tmp_path: Path) -> None:
    created = json_of(fedssl("run", "submit", "-", "--format", "json", text=spec))
    train(coordinator, created, tmp_path)
    assert fedssl("run", "pull", created["id"], "--out", "out").exit_code == 0
    assert fedssl("export", "out", "--to", "onnx").exit_code == 0
    assert Path("out/encoder.onnx").is_file()


def _flip_a_bit(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    os.utime(path, (0, 0))


def test_the_card_of_a_run_in_progress_describes_the_weights_next_to_it(
    coordinator: Coordinator, fedssl: Fedssl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny_spec(name="tiny", num_rounds=3, cohort={"min_clients": 2, "min_updates": 2})
    run_id = coordinator.client.create_run(spec.model_copy(update={"partition": None})).id
    workers = [coordinator.worker(name) for name in ("hospital-a", "hospital-b")]

    def train_on(worker: WorkerClient, num_examples: int) -> None:
        item = worker.claim(0)
        assert item is not None
        deliver(worker, item, tmp_path, item.round_number / 4, num_examples)
        coordinator.advance(run_id)

    coordinator.advance(run_id)
    for worker in workers:
        train_on(worker, 10)
    train_on(workers[0], 20)

    def pull() -> tuple[dict[str, Any], dict[str, Any], str]:
        pulled = json_of(fedssl("run", "pull", run_id, "--out", "out", "--format", "json"))
        card = Path(pulled["files"]["card"]).read_text()
        return pulled, json.loads(Path(pulled["files"]["lineage"]).read_text()), card

    pulled, lineage, card = pull()
    assert pulled["rounds_closed"] == 1
    assert [entry["number"] for entry in lineage["rounds"]] == [1]
    assert "| hospital-a | 10 |" in card

    download = Client.download_model

    def close_round_2_before(*arguments: Any, **options: Any) -> str:
        patch.undo()
        train_on(workers[1], 20)
        return download(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Client, "download_model", close_round_2_before)
        pulled, lineage, card = pull()
    assert lineage["model"] == pulled["sha256"] == coordinator.client.run(run_id).model
    assert pulled["rounds_closed"] == 2
    assert [entry["number"] for entry in lineage["rounds"]] == [1, 2]
    assert "| hospital-a | 20 |" in card

    other = coordinator.client.create_run(spec.model_copy(update={"partition": None, "name": "other"})).id
    for initial in ([], ["--initial"]):
        refused = fedssl("run", "pull", other, "--out", "out", *initial)
        assert (refused.exit_code, f"holds the files of run {run_id}: choose another" in refused.stderr) == (2, True)
    Path(pulled["files"]["lineage"]).write_text("{")
    assert pull()[1] == lineage  # a damaged file is written again

    view = coordinator.client.run(run_id)
    rounds = list(coordinator.client.rounds(run_id))[:2]
    skipped = [rounds[0], rounds[1].model_copy(update={"verdict": "skipped"})]
    assert "| hospital-a | 10 |" in model_card.card(view, skipped, [], lineage)
    digits = spec.model_copy(update={"partition": PartitionConfig(dataset="digits")})
    partitioned = model_card.card(view.model_copy(update={"spec": digits}), skipped, [], lineage)
    assert "The spec describes them as a partition of `digits`, which the coordinator cannot check." in partitioned
    entries = model_card.lineage_of(view, skipped, "m", "e")["rounds"]
    assert [(entry["verdict"], len(entry["updates"])) for entry in entries] == [(rounds[0].verdict, 2), ("skipped", 0)]


def test_runs_and_their_events_are_shown_as_tables_and_as_json(
    coordinator: Coordinator, fedssl: Fedssl, spec: str, tmp_path: Path
) -> None:
    created = json_of(fedssl("run", "submit", "-", "--format", "json", text=spec))
    train(coordinator, created, tmp_path)

    assert [run["id"] for run in json_of(fedssl("run", "ls", "--format", "json"))] == [created["id"]]
    assert created["id"][:8] in fedssl("run", "ls").stdout
    shown = fedssl("run", "show", created["id"]).stdout
    for word in (created["id"], "completed", "0.5000", "round 1: aggregated", "hospital-a"):
        assert word in shown
    assert json_of(fedssl("run", "show", created["id"], "--format", "json"))["spec"]["name"] == "tiny"
    kinds = [event["kind"] for event in json_of(fedssl("run", "logs", created["id"], "--format", "json"))]
    assert (kinds[0], kinds[-1]) == ("run.created", "run.finished")
    followed = fedssl("run", "logs", created["id"], "--follow", "--format", "json").stdout.splitlines()
    assert [json.loads(line)["kind"] for line in followed] == kinds
    assert "run.finished" in fedssl("run", "logs", created["id"]).stdout


def test_a_workers_reason_cannot_add_lines_or_control_the_terminal(
    coordinator: Coordinator, fedssl: Fedssl, spec: str
) -> None:
    created = json_of(fedssl("run", "submit", "-", "--format", "json", text=spec))
    worker = coordinator.worker("hospital-a")
    coordinator.advance(created["id"])
    item = worker.claim(0)
    assert item is not None
    forged = "no\r\n2026-01-01 00:00:00Z      1  round.closed            round 1: aggregated\x1b[2J\x9b2J\u202e"
    worker.decline(item.assignment_id, forged)
    assert fedssl("run", "stop", created["id"]).exit_code == 0
    num_events = len(json_of(fedssl("run", "logs", created["id"], "--format", "json")))
    for options in ((), ("--follow",), ("--follow", "--format", "json")):
        shown = fedssl("run", "logs", created["id"], *options).stdout
        assert len(shown.rstrip("\n").split("\n")) == num_events, shown
        assert all(char.isprintable() or char == "\n" for char in shown), ascii(shown)
    watched = fedssl("run", "watch", created["id"]).stderr
    assert "hospital-a declined: no 2026" in watched
    assert all(char.isprintable() or char == "\n" for char in watched), ascii(watched)


def test_lists_show_the_project_if_there_are_several(coordinator: Coordinator, fedssl: Fedssl, spec: str) -> None:
    def heads() -> list[str]:
        lists = [("run", "ls"), ("client", "ls"), ("notify", "ls")]
        return [fedssl(*command).stdout.strip().splitlines()[0] for command in lists]

    for project in ("default", "hearts"):
        assert fedssl("project", "create", project).exit_code == 0
        assert fedssl("token", "create", "--role", "worker", "--client", f"{project}-1", "--project", project).stdout
        assert fedssl("run", "submit", "-", "--no-start", "--project", project, text=spec).exit_code == 0
        target = f"https://hooks.example.org/{project}"
        assert fedssl("notify", "add", target, "--project", project).exit_code == 0
        assert [" project " in head for head in heads()] == [project == "hearts"] * 3
    [run] = [view for view in coordinator.client.runs() if view.project == "hearts"]
    assert "hearts" in fedssl("run", "show", str(run.id)).stdout


def test_clients_and_tokens_are_created_listed_and_revoked(
    coordinator: Coordinator, fedssl: Fedssl, tmp_path: Path
) -> None:
    secret = fedssl("token", "create", "--role", "worker", "--client", "hospital-a", "--label", "first").stdout
    assert secret.startswith("fedssl_")
    assert len(secret.splitlines()) == 1
    made = fedssl("token", "create", "--role", "operator", "--out", "kept/operator", "--format", "json")
    assert "secret" not in json_of(made)
    kept = tmp_path / "kept" / "operator"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert fedssl("run", "ls", "--token-file", kept).exit_code == 0
    assert fedssl("token", "revoke", json_of(made)["id"]).exit_code == 0
    assert fedssl("run", "ls", "--token-file", kept).exit_code == 4
    tokens = json_of(fedssl("token", "ls", "--format", "json"))
    assert {token["label"] for token in tokens} == {"", "first"}
    assert all("secret" not in token for token in tokens)

    assert [view["id"] for view in json_of(fedssl("client", "ls", "--format", "json"))] == ["hospital-a"]
    assert "invited" in fedssl("client", "ls").stdout
    assert json_of(fedssl("client", "show", "hospital-a", "--format", "json"))["revoked_at"] is None
    assert fedssl("client", "revoke", "hospital-a").exit_code == 0
    assert "revoked" in fedssl("client", "ls").stdout
    refused = fedssl("token", "create", "--role", "worker", "--client", "hospital-a")
    assert (refused.exit_code, "revoked" in refused.stderr) == (5, True)


def test_expiring_tokens_and_used_enrolment_tokens_are_listed(
    coordinator: Coordinator, fedssl: Fedssl, tmp_path: Path
) -> None:
    viewer = fedssl("token", "create", "--role", "viewer", "--expires", "30d", "--out", "viewer", "--format", "json")
    made = json_of(viewer)
    created, expires = (datetime.fromisoformat(made[key]) for key in ("created_at", "expires_at"))
    assert expires - created == timedelta(days=30)
    assert fedssl("run", "ls", "--token-file", tmp_path / "viewer").exit_code == 0
    refused = fedssl("token", "ls", "--token-file", tmp_path / "viewer")
    assert (refused.exit_code, "needs an admin's token" in refused.stderr) == (4, True)
    secret = fedssl("token", "enrol", "hospital-b", "--label", "by post").stdout.strip()
    worker = WorkerClient(coordinator.url, secret)
    worker.enrol(sha256(b"made by the worker").hexdigest())
    listed = fedssl("token", "ls").stdout
    for word in ("enrolment", "hospital-b", "by post", "expires", "used", f"{expires:%Y-%m-%d %H:%M:%S}Z"):
        assert word in listed
    assert secret not in listed


def test_the_secret_of_a_kit_is_not_printed(coordinator: Coordinator, fedssl: Fedssl, tmp_path: Path) -> None:
    address = ("--address", "https://fedssl.example.org/")
    earlier = fedssl("token", "enrol", "hospital-c").stdout.strip()
    without_https = fedssl("token", "enrol", "hospital-c", "--kit", "c.zip")
    assert (without_https.exit_code, "with --address" in without_https.stderr) == (2, True)
    (tmp_path / "c.zip").touch()
    existing = fedssl("token", "enrol", "hospital-c", "--kit", "c.zip", *address)
    assert (existing.exit_code, "c.zip exists" in existing.stderr) == (2, True)
    both = fedssl("token", "enrol", "hospital-c", "--kit", "d.zip", "--out", "d", *address)
    assert (both.exit_code, "leave out --out" in both.stderr) == (2, True)
    # None of these refused commands has revoked the unused token.
    WorkerClient(coordinator.url, earlier).enrol(sha256(b"of hospital-c").hexdigest())

    made = fedssl("token", "enrol", "hospital-d", "--kit", "kits/d.zip", *address, "--format", "json")
    with zipfile.ZipFile(tmp_path / "kits/d.zip") as kit:
        lines = kit.read("fedssl-hospital-d/.env").decode().splitlines()
    secret = next(line.partition("=")[2] for line in lines if line.startswith("FEDSSL_ENROLMENT_TOKEN="))
    assert secret not in made.stdout + made.stderr
    assert json_of(made)["client_id"] == "hospital-d"
    assert "FEDSSL_COORDINATOR=https://fedssl.example.org" in lines
    WorkerClient(coordinator.url, secret).enrol(sha256(b"of hospital-d").hexdigest())


def test_a_secret_is_not_created_if_its_file_cannot_be_written(
    coordinator: Coordinator, fedssl: Fedssl, tmp_path: Path
) -> None:
    earlier = fedssl("token", "enrol", "hospital-e").stdout.strip()
    tokens = json_of(fedssl("token", "ls", "--format", "json"))
    hook = ("notify", "add", "https://hooks.example.org/hook")
    (tmp_path / "file").touch()
    for command in (("token", "create", "--role", "viewer"), ("token", "enrol", "hospital-e"), hook):
        refused = fedssl(*command, "--out", "file/secret")
        assert (refused.exit_code, "file/secret cannot be written" in refused.stderr) == (2, True), refused.stderr
    assert json_of(fedssl("token", "ls", "--format", "json")) == tokens
    assert json_of(fedssl("notify", "ls", "--format", "json")) == []
    WorkerClient(coordinator.url, earlier).enrol(sha256(b"of hospital-e").hexdigest())

    for wrong in ("nobody", "ftp://hooks.example.org/hook"):
        refused = fedssl("notify", "add", wrong)
        assert (refused.exit_code, "TARGET: target is not the URL of a webhook" in refused.stderr) == (2, True)
    assert "CLIENT: a client's name has at most 63 lower-case letters" in fedssl("token", "enrol", "Hospital E").stderr

    assert fedssl(*hook, "--out", "new/folder/hook").exit_code == 0
    assert (tmp_path / "new/folder/hook").read_text().startswith("whsec_")


def test_a_dry_run_shows_which_clients_would_take_part_and_creates_no_run(
    coordinator: Coordinator, fedssl: Fedssl, spec: str
) -> None:
    coordinator.worker("hospital-a")
    coordinator.worker("hospital-b")
    coordinator.client.revoke_client("hospital-b")
    old = Register(
        worker_version="test", methods={"orchestra": 1}, device="cpu", num_images=9, channels=1, image_size=8
    )
    coordinator.worker("hospital-c", register=False).register(old)

    found = json_of(fedssl("run", "submit", "-", "--dry-run", "--format", "json", text=spec))
    asked = ("--set", 'cohort.clients=["hospital-a","hospital-b","hospital-z"]', "--set", "cohort.min_clients=3")
    more = fedssl("run", "submit", "-", "--dry-run", *asked, text=spec)

    assert (found["rounds"], found["clients"], found["clients_missing"]) == (1, ["hospital-a"], 0)
    assert found["left_out"]["hospital-b"] == "its access was revoked"
    assert "update the worker" in found["left_out"]["hospital-c"]
    assert found["bytes_up_per_client_and_round"] > 0
    assert (found["seconds_per_round"], found["seconds_in_total"]) == (None, None)
    assert "no client has trained such a model" in more.stdout
    assert "hospital-z" in more.stdout
    assert "has not registered" in more.stdout
    assert "would wait for 2 more clients" in more.stderr
    unknown = fedssl("run", "submit", "-", "--dry-run", "--project", "nowhere", text=spec)
    assert unknown.exit_code != 0
    assert "nowhere" in unknown.stderr
    assert list(coordinator.client.runs()) == []


def test_the_reason_of_a_run_lists_the_declines(coordinator: Coordinator, fedssl: Fedssl, spec: str) -> None:
    workers = {name: coordinator.worker(name) for name in ("hospital-a", "hospital-b")}
    run = json_of(fedssl("run", "submit", "-", "--set", "cohort.min_clients=2", "--format", "json", text=spec))["id"]
    coordinator.advance(coordinator.client.run(run).id)
    item = workers["hospital-b"].claim(0)
    assert item is not None
    workers["hospital-b"].decline(item.assignment_id, "no images of this size")

    expected = "1 of 2 clients declined: hospital-b: no images of this size"
    assert json_of(fedssl("run", "show", run, "--format", "json"))["reason"] == expected
    assert json_of(fedssl("run", "ls", "--format", "json"))[0]["reason"] == expected
    for command in (("run", "show", run), ("run", "ls")):
        assert "1 of 2 clients declined" in fedssl(*command).stdout, command


def test_a_run_is_renamed_tagged_and_described(coordinator: Coordinator, fedssl: Fedssl, spec: str) -> None:
    run = json_of(fedssl("run", "submit", "-", "--no-start", "--format", "json", text=spec))["id"]
    words = ("--name", "second try", "--tag", "baseline", "--tag", "table-1", "--notes", "eight sites")
    found = json_of(fedssl("run", "edit", run, *words, "--format", "json"))
    assert (found["name"], found["tags"], found["notes"]) == ("second try", ["baseline", "table-1"], "eight sites")
    assert "baseline, table-1" in fedssl("run", "show", run).stdout
    assert json_of(fedssl("run", "edit", run, "--no-tags", "--format", "json"))["tags"] == []
    for wrong in ((), ("--tag", "a", "--no-tags"), ("--tag", "Upper")):
        assert fedssl("run", "edit", run, *wrong).exit_code != 0


def test_a_run_is_submitted_awaited_and_pulled_from_python(
    coordinator: Coordinator, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSSL_URL", coordinator.url)
    monkeypatch.setenv("FEDSSL_TOKEN", coordinator.admin_token)
    with Client.from_env() as client:
        run = client.create_run(json.loads(spec), start=True)
        with pytest.raises(RunNotFinished, match="is running after 0 of 1 round:") as late:
            client.wait(run.id, timeout_seconds=0)
        assert late.value.run.id == run.id
        train(coordinator, {"id": run.id}, tmp_path)

        finished = client.wait(run.id, timeout_seconds=60)
        pulled = client.pull(run.id, tmp_path / "pulled")

    assert finished.outcome == "completed"
    assert pulled.digest == finished.model
    assert {what: path.name for what, path in pulled.files.items()} == {
        "model": "model.safetensors", "spec": "spec.yaml", "encoder": "encoder.safetensors", "card": "model-card.md",
        "lineage": "lineage.json",
    }  # fmt: skip
    assert all(path.is_file() for path in pulled.files.values())


def test_the_exit_code_reports_how_a_run_ended(coordinator: Coordinator, fedssl: Fedssl, spec: str) -> None:
    created = json_of(fedssl("run", "submit", "-", "--format", "json", text=spec))
    late = fedssl("run", "wait", created["id"], "--timeout", "1s", "--format", "json")
    assert (late.exit_code, json.loads(late.stdout)["state"]) == (8, "running")
    assert fedssl("run", "pause", created["id"]).exit_code == 0
    paused = fedssl("run", "wait", created["id"])
    assert (paused.exit_code, "fedssl run resume" in paused.stderr) == (7, True)
    assert fedssl("run", "wait", created["id"], "--through-pauses", "--timeout", "1s").exit_code == 7
    assert json_of(fedssl("run", "stop", created["id"], "--format", "json"))["outcome"] == "stopped"

    for verb in ("wait", "watch"):
        result = fedssl("run", verb, created["id"], "--format", "json")
        assert result.exit_code == 6
        assert json.loads(result.stdout)["outcome"] == "stopped"
        assert "is stopped: stopped by an operator" in result.stderr
        shown = fedssl("run", verb, created["id"])
        assert (shown.stdout + shown.stderr).count("stopped by an operator") == 1, "an error is printed once"


def test_rounds_metrics_and_artifacts_are_shown_and_exported(
    coordinator: Coordinator, fedssl: Fedssl, spec: str, tmp_path: Path
) -> None:
    created = json_of(fedssl("run", "submit", "-", "--format", "json", text=spec))
    train(coordinator, created, tmp_path)

    (only,) = json_of(fedssl("run", "rounds", created["id"], "--format", "json"))
    assert (only["number"], only["verdict"]) == (1, "aggregated")
    assert "aggregated" in fedssl("run", "rounds", created["id"]).stdout
    losses = json_of(fedssl("run", "metrics", created["id"], "--name", "loss", "--format", "json"))
    assert [(row["client_id"], row["value"]) for row in losses] == [("hospital-a", 0.5), (None, 0.5)]
    for form in ("csv", "json", "tensorboard"):
        assert json_of(fedssl("run", "export-metrics", created["id"], "--to", form, "--out", f"out.{form}",
                               "--format", "json"))["num_numbers"] == 5  # fmt: skip
    head, *rows = Path("out.csv").read_text().splitlines()
    assert head == "round,client,name,value"
    assert rows[:2] == ["1,,loss,0.5", "1,hospital-a,loss,0.5"]
    measured = ("update_cosine", "update_norm", "update_weight_share")
    assert [row.rsplit(",", 1)[0] for row in rows[2:]] == [f"1,hospital-a,{name}" for name in measured]
    assert [row["value"] for row in json.loads(Path("out.json").read_text())["numbers"]][:2] == [0.5, 0.5]
    written = EventAccumulator("out.tensorboard").Reload()
    assert [(point.step, point.value) for point in written.Scalars("loss/hospital-a")] == [(1, 0.5)]
    update = only["assignments"][0]["update"]
    assert json_of(fedssl("artifact", "get", update, "--out", "update", "--format", "json"))["sha256"] == update
    assert sha256(Path("update").read_bytes()).hexdigest() == update
    assert [row["id"] for row in json_of(fedssl("run", "ls", "--state", "paused", "--format", "json"))] == []
    (closed,) = json_of(fedssl("run", "logs", created["id"], "--kind", "round.closed", "--format", "json"))
    assert closed["round_number"] == 1


def test_the_doctor_finds_no_problem_with_a_healthy_coordinator(
    coordinator: Coordinator, fedssl: Fedssl, tmp_path: Path
) -> None:
    folder = tmp_path / "images" / "healthy"
    folder.mkdir(parents=True)
    Image.effect_noise((16, 16), 40).save(folder / "0.png")
    found = json_of(fedssl("doctor", "--data", folder.parent, "--format", "json"))
    assert found["ok"] is True
    checks = {check["name"]: check["found"] for check in found["checks"]}
    assert {"coordinator", "clock", "its servers", "token and methods", "data"} <= checks.keys()
    assert "wrong" not in checks.values()
    Path("wrong").write_text("fedssl_wrong")
    Path("wrong").chmod(0o600)
    ill = fedssl("doctor", "--token-file", "wrong", "--format", "json")
    assert ill.exit_code == 1
    assert [check["name"] for check in json.loads(ill.stdout)["checks"] if check["found"] == "wrong"] == ["token"]


def test_the_shell_completes_runs_and_clients(coordinator: Coordinator, fedssl: Fedssl, spec: str) -> None:
    created = json_of(fedssl("run", "submit", "-", "--format", "json", text=spec))
    coordinator.worker("hospital-a")
    assert complete(f"fedssl run show {created['id'][:2]}") == [f"{created['id'][:8]}"]
    assert complete("fedssl client show hosp") == ["hospital-a"]
    assert complete("fedssl run show zz") == []


def complete(line: str) -> list[str]:
    """Return what the completion of bash suggests for the last word of a line."""
    words = line.split()
    shell = {"_FEDSSL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = CliRunner().invoke(app, [], prog_name="fedssl", env=shell)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["run", "show", "00000000-0000-4000-8000-000000000000"], 5, "no run"),
        (["run", "show", "abcd"], 5, "no run has an id that begins with abcd"),
        (["run", "show", "abc"], 2, "at least the first 4"),
        (["client", "show", "nobody"], 5, "no client nobody"),
        (["client", "show", "No Body"], 2, "client_id"),
        (["method", "show", "fedsimlcr"], 2, "did you mean fedsimclr?"),
        (["token", "create", "--role", "worker"], 2, "needs --client"),
        (["token", "create", "--role", "worker", "--client", "No"], 2, "--client: "),
        (["token", "create", "--role", "operator", "--out", "token"], 2, "token exists"),
        (["token", "create", "--role", "viewer", "--expires", "soon"], 2, "--expires: write a number and s, m, h or d"),
        (["token", "enrol", "No"], 2, "CLIENT: "),
        (["token", "enrol", "a", "--expires", "0d"], 2, "--expires: "),
        (["token", "revoke", "00000000-0000-4000-8000-000000000000"], 5, "no token"),
        (["run", "submit", "missing.toml"], 2, "No such file"),
        (["run", "submit", "-", "--set", "method.name=fedx9"], 2, "method.name: there is no 'fedx9' here"),
        (["run", "ls", "--url", "nonsense"], 2, "http://HOST:PORT"),
    ],
)
def test_errors_are_one_clear_line(fedssl: Fedssl, arguments: list[str], code: int, said: str) -> None:
    result = fedssl(*arguments, text="")

    assert result.exit_code == code, result.output
    assert said in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stdout == ""


def test_a_wrong_token_exits_with_4(coordinator: Coordinator, fedssl: Fedssl, tmp_path: Path) -> None:
    wrong, worker = tmp_path / "wrong", tmp_path / "worker"
    wrong.write_text("fedssl_wrong")
    worker.write_text(coordinator.worker_token("hospital-a"))
    for path, said in ((wrong, "valid token"), (worker, "needs a viewer's, an operator's or an admin's token")):
        path.chmod(0o600)
        result = fedssl("run", "ls", "--token-file", path)
        assert result.exit_code == 4
        assert said in result.stderr


def test_no_coordinator_at_the_address_exits_with_3(fedssl: Fedssl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedssl.client.Retry", lambda seconds: Retry(seconds=seconds / 10))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"

    result = fedssl("run", "ls", "--url", url)

    assert result.exit_code == 3
    assert result.stderr.startswith(f"error: No answer from {url}")
    assert len(result.stderr.splitlines()) == 1
