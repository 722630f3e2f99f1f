"""`fedssl-worker check` finds problems, sends nothing, and reports by its exit code whether there are any."""

import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedssl.cli.specs import read_spec
from fedssl.engine import LocalProgress
from fedssl.engine.secure_sums import num_vector_bytes
from fedssl.errors import MethodError
from fedssl.methods import METHODS
from fedssl.methods.api import Context
from fedssl.protocol.work import CheckNumbers
from fedssl_worker.check import trial
from fedssl_worker.check_numbers import read_numbers
from fedssl_worker.disclosure.policy import PolicyEnforcer
from fedssl_worker.main import app
from fedssl_worker.settings import SettingsError
from support.answers import Answers, answering
from support.certificates import Authority
from support.connect_proxy import ConnectProxy, InspectingProxy
from support.federation import tiny_spec
from support.methods import CONFIGS, method_spec

HEALTHY = {("GET", "/healthz"): {"status": "ok"}, ("GET", "/readyz"): {"status": "ok", "checks": {}}}
SITES = {"classes": ["cat", "dog", "owl"], "min_count": 2, "score_bins": 4}
POLICY = """
schema = 1
client = "a"
coordinator = "{coordinator}"
{rules}
[metrics]
allow = ["loss"]
"""
ALLOW = '[[allow]]\nartifact = "weights"\nmethods = ["*"]\n'


@pytest.fixture
def server() -> Iterator[Answers]:
    with answering(dict(HEALTHY)) as running:
        yield running


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with 60 grey images of two classes. No environment variable of a worker or a proxy is set.

    Steps are timed over fewer than in practice.
    """
    monkeypatch.setattr(trial, "NUM_STEPS", 4)
    for name in ("COORDINATOR", "TOKEN", "TOKEN_FILE", "ENROLMENT_TOKEN", "POLICY", "LABELS", "DATA", "STATE"):
        monkeypatch.delenv(f"FEDSSL_WORKER_{name}", raising=False)
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    random = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(30):
            pixels = random.integers(0, 255, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    return tmp_path


def _spec(folder: Path, **changes: Any) -> Path:
    path = folder / "spec.json"
    path.write_text(tiny_spec(**changes).model_dump_json())
    return path


def _check(url: str, folder: Path, *arguments: object, code: int = 0) -> dict[str, Any]:
    options = ["--coordinator", url, "--data", folder / "images", "--state", folder / "state", *arguments]
    result = CliRunner().invoke(app, ["check", "--format", "json", *map(str, options)])
    assert result.exit_code == code, result.output
    assert (folder / "state").exists() == ("--report" in arguments)
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["ok"] == (code == 0)
    return found


def _by_name(found: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {check["name"]: (check["found"], check["what"]) for check in found["checks"]}


def test_images_of_more_than_8_bits_need_the_window_of_the_run(server: Answers, site: Path) -> None:
    random = np.random.default_rng(0)
    for path in (site / "images").rglob("*.png"):
        Image.fromarray(random.integers(0, 4096, (8, 8)).astype(np.uint16)).save(path)
    data = {**tiny_spec().data.model_dump(), "window": {"values": (0, 4095)}}
    found = _check(server.url, site, "--spec", _spec(site, data=data))
    assert _by_name(found)["training"][0] == "ok"
    found = _check(server.url, site, "--spec", _spec(site), code=1)
    assert "[data.window]" in _by_name(found)["training"][1]


def test_a_site_that_is_ready_gets_sizes_and_times(server: Answers, site: Path) -> None:
    found = _check(server.url, site, "--spec", _spec(site, num_rounds=5))
    checks = _by_name(found)
    assert {found for found, _ in checks.values()} == {"ok", "note"}
    assert [name for name, (found, _) in checks.items() if found == "note"] == ["token", "policy"]
    assert "60 images for a worker" in checks["data"][1]
    assert found["update_bytes"] > 0
    assert found["broadcast_bytes"] > 0
    assert "weights" in checks["what a round sends"][1]
    assert "loss" in checks["metrics"][1]
    steps, rest = checks["training"][1].split(" steps, ")
    assert int(steps) >= trial.NUM_STEPS
    seconds_per_step, num_steps = float(rest.split(" s per step")[0]), int(rest.split("a round has ")[1].split()[0])
    assert found["seconds_per_round"] == pytest.approx(seconds_per_step * num_steps, rel=0.01)
    assert num_steps == 60 // tiny_spec().training.batch_size * tiny_spec().training.local_epochs


def test_a_check_requests_only_health_and_readiness_from_the_coordinator(
    server: Answers, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSSL_WORKER_ENROLMENT_TOKEN", "fedssl_" + "x" * 43)
    found = _check(server.url, site, "--spec", _spec(site))
    assert set(server.asked) == {("GET", "/healthz"), ("GET", "/readyz")}
    assert _by_name(found)["token"] == ("ok", "an enrolment token is given; this check does not use it")


def test_without_a_spec_nothing_is_trained_and_a_note_explains_it(server: Answers, site: Path) -> None:
    found = _check(server.url, site)
    checks = _by_name(found)
    assert checks["run"] == ("note", "no spec was given")
    assert "training" not in checks
    assert (found["update_bytes"], found["seconds_per_round"]) == (None, None)


def test_the_table_ends_with_the_minutes_per_round(server: Answers, site: Path) -> None:
    options = ["--coordinator", server.url, "--data", site / "images", "--state", site / "state", "--spec", _spec(site)]
    result = CliRunner().invoke(app, ["check", *map(str, options)])
    assert result.exit_code == 0, result.output
    assert "minutes per round" in result.stderr.splitlines()[-1]
    assert "what a round sends" in result.stdout


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ("", "no rule allows weights"),
        (ALLOW + "max_rounds = 1\n", "the run has 2 rounds, max_rounds allows 1"),
        ("max_rounds_total = 1\n" + ALLOW, "the run has 2 rounds, max_rounds_total allows 1"),
        ("max_bytes_total = 100\n" + ALLOW, "max_bytes_total allows 100 in all runs"),
    ],
)
def test_a_policy_that_does_not_permit_the_run_is_a_problem(
    server: Answers, site: Path, rules: str, words: str
) -> None:
    (site / "policy.toml").write_text(POLICY.format(coordinator=server.url, rules=rules))
    found = _check(server.url, site, "--policy", site / "policy.toml", "--spec", _spec(site, num_rounds=2), code=1)
    found_it, what = _by_name(found)["policy and run"]
    assert (found_it, words in what) == ("wrong", True), what


def test_a_secure_round_sends_a_masked_vector(server: Answers, site: Path) -> None:
    secure = {"min_cohort": 3, "collusion": 0}
    path = _spec(site, num_rounds=2, aggregation={"arithmetic": "fixed"}, secure_aggregation=secure)
    spec = read_spec(str(path))
    vector = num_vector_bytes(METHODS[spec.method.name], Context(spec=spec, round_number=1))
    (site / "policy.toml").write_text(
        POLICY.format(coordinator=server.url, rules=f"max_bytes_total = {2 * vector}\n{ALLOW}")
    )
    found = _check(server.url, site, "--policy", site / "policy.toml", "--spec", path, code=1)
    assert vector < found["update_bytes"] < vector + 200, "with the header of the file"
    sent = 2 * found["update_bytes"]
    assert f"all rounds send {sent} bytes, max_bytes_total allows {2 * vector}" in _by_name(found)["policy and run"][1]
    assert "each sends a masked vector of weights" in _by_name(found)["what a round sends"][1]


def test_a_policy_that_permits_the_run_shows_which_numbers_it_withholds(server: Answers, site: Path) -> None:
    (site / "policy.toml").write_text(POLICY.format(coordinator=server.url, rules=ALLOW))
    checks = _by_name(_check(server.url, site, "--policy", site / "policy.toml", "--spec", _spec(site)))
    assert checks["policy and run"] == ("ok", "the policy permits every round; also loss")
    assert "of a has 1 rule" in checks["policy"][1]
    sent, withheld = checks["metrics"][1].split("; withheld: ")
    assert sent == "a round sends loss"
    assert "divergence" in withheld


def test_a_policy_for_another_coordinator_is_a_problem(server: Answers, site: Path) -> None:
    (site / "policy.toml").write_text(POLICY.format(coordinator="https://other.example", rules=ALLOW))
    checks = _by_name(_check(server.url, site, "--policy", site / "policy.toml", "--spec", _spec(site), code=1))
    assert "is for the coordinator https://other.example" in checks["policy"][1]
    assert "policy and run" not in checks


def test_a_check_with_labels_reports_what_an_evaluation_would_send(server: Answers, site: Path) -> None:
    spec = _spec(site, evaluation={"at": "sites", "measures": ["knn"], "sites": SITES})
    checks = _by_name(_check(server.url, site, "--labels", "own", "--spec", spec))
    assert checks["labels"] == ("ok", "60 of 60 images have labels of 2 classes")
    what = checks["evaluation at the site"][1]
    assert "counts of 2 of 3 classes without owl (fewer than 2 training or test images)" in what
    assert "from about 12 test images: at most" in what
    assert _by_name(_check(server.url, site, "--spec", spec))["labels"][0] == "note"
    spec = _spec(site, evaluation={"at": "sites", "measures": ["probe"], "sites": {**SITES, "cross_site": "probe"}})
    checks = _by_name(_check(server.url, site, "--labels", "own", "--spec", spec))
    assert checks["site-head"][1].endswith("which every other site receives")
    assert checks["cross-evaluation"][0] == "ok"
    (site / "policy.toml").write_text(POLICY.format(coordinator=server.url, rules=ALLOW))
    given = ("--policy", site / "policy.toml", "--labels", "own", "--spec", spec)
    denied = _by_name(_check(server.url, site, *given))
    assert {denied[name][0] for name in ("site-head", "cross-evaluation")} == {"note"}


def test_a_policy_without_a_rule_for_evaluations_is_a_note(server: Answers, site: Path) -> None:
    spec = _spec(site, evaluation={"at": "sites", "measures": ["knn"], "sites": SITES})
    (site / "policy.toml").write_text(POLICY.format(coordinator=server.url, rules=ALLOW))
    given = ("--policy", site / "policy.toml", "--labels", "own", "--spec", spec)
    assert "no rule allows evaluation" in _by_name(_check(server.url, site, *given))["evaluation at the site"][1]
    rule = '[[allow]]\nartifact = "evaluation"\nmethods = ["*"]\nmin_count = 2\n'
    rules = "max_evaluations_total = 1\n" + ALLOW + rule
    (site / "policy.toml").write_text(POLICY.format(coordinator=server.url, rules=rules))
    found, what = _by_name(_check(server.url, site, *given))["evaluation at the site"]
    assert (found, what) == ("note", "the run asks for 2 evaluations, max_evaluations_total allows 1 in all runs")
    rule = '[[allow]]\nartifact = "evaluation"\nmethods = ["*"]\nmin_count = 20\n'
    (site / "policy.toml").write_text(POLICY.format(coordinator=server.url, rules=ALLOW + rule))
    checks = _by_name(_check(server.url, site, *given, code=1))
    assert "0 of the run's 3 classes have at least 20 training and 20 test images" in checks["labels"][1]


def test_labels_and_images_that_cannot_be_used_are_problems(server: Answers, site: Path) -> None:
    (site / "labels.csv").write_text("path,label\ncat/0.png,cat\ncat/99.png,cat\n")
    checks = _by_name(_check(server.url, site, "--labels", site / "labels.csv", code=1))
    assert (checks["labels"][0], "labels.csv, line 3" in checks["labels"][1]) == ("wrong", True), checks["labels"]
    (site / "images" / "cat" / "0.png").write_bytes(b"not an image")
    checks = _by_name(_check(server.url, site, "--spec", _spec(site), code=1))
    assert checks["data"][0] == "wrong"
    assert "training" not in checks
    missing = _by_name(_check(server.url, site, "--data", site / "nothing", code=1))
    assert missing["data"][0] == "wrong"


def test_a_classifiers_training_steps_are_timed_and_a_ridge_probe_has_none(server: Answers, site: Path) -> None:
    """The time per step does not depend on the labels."""
    classes = ["cat", "dog"]
    method = {"name": "classifier", "start": "given", "encoder_learning_rate": 0.01, "classes": classes}
    model = {"encoder": {"widths": [4, 8]}, "initial": {"weights": "of-a-probe"}}
    own = ("--labels", "own", "--spec")
    checks = _by_name(_check(server.url, site, *own, _spec(site, method=method, model=model)))
    assert "s per step" in checks["training"][1]
    probe = {"name": "ridge-probe", "classes": classes}
    checks = _by_name(_check(server.url, site, *own, _spec(site, method=probe)))
    assert "takes no training steps" in checks["training"][1]


def test_missing_labels_classes_or_groups_that_a_run_trains_on_are_a_problem(server: Answers, site: Path) -> None:
    spec = _spec(site, method={"name": "ridge-probe", "classes": ["cat", "owl"]})
    assert "ridge-probe trains on them" in _by_name(_check(server.url, site, "--spec", spec, code=1))["labels"][1]
    found = _check(server.url, site, "--labels", "own", "--spec", spec, code=1)
    (wrong,) = (each["what"] for each in found["checks"] if each["found"] == "wrong")
    assert "'dog' is not a class of the run, which has cat, owl" in wrong
    spec = _spec(site, data={"channels": 1, "image_size": 8, "distinct_groups": True})
    assert "data.distinct_groups needs" in _by_name(_check(server.url, site, "--spec", spec, code=1))["groups"][1]
    names = [f"{name}/{number}.png" for name in ("cat", "dog") for number in range(30)]
    (site / "l.csv").write_text("path,label,group\n" + "".join(f"{name},x,{name}\n" for name in names))
    assert "groups" not in _by_name(_check(server.url, site, "--labels", site / "l.csv", "--spec", spec))
    (site / "l.csv").write_text("path,cat\n" + "".join(f"{name},1\n" for name in names))
    spec = _spec(site, method={"name": "ridge-probe", "classes": ["cat", "owl"], "multi_label": True})
    found = _by_name(_check(server.url, site, "--labels", site / "l.csv", "--spec", spec, code=1))
    assert "no column of owl" in found["labels"][1]


def test_supervised_training_needs_a_folder_per_class(server: Answers, site: Path) -> None:
    spec = _spec(site, method={"name": "supervised", "num_classes": 3})
    found = _by_name(_check(server.url, site, "--spec", spec, code=1))
    assert "not in method.num_classes = 3 folders" in found["class folders"][1]
    (site / "images" / "owl").mkdir()
    assert "class folders" not in _by_name(_check(server.url, site, "--spec", spec))


def test_a_shape_that_the_worker_does_not_serve_is_a_problem(server: Answers, site: Path) -> None:
    spec = _spec(site, data={"channels": 3, "image_size": 8})
    checks = _by_name(_check(server.url, site, "--channels", 1, "--spec", spec, code=1))
    assert "this client serves only 1 channel" in checks["data"][1]


def test_an_unreachable_coordinator_or_a_clock_that_differs_is_a_problem(server: Answers, site: Path) -> None:
    server.date = "Thu, 19 Nov 2020 00:00:00 GMT"
    assert "ahead of the coordinator's" in _by_name(_check(server.url, site, code=1))["clock"][1]
    assert _by_name(_check("http://127.0.0.1:9", site, code=1))["coordinator"][0] == "wrong"


def test_a_missing_device_and_a_full_disk_are_problems(
    server: Answers, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10}))
    checks = _by_name(_check(server.url, site, "--device", "cuda:63", "--spec", _spec(site), code=1))
    assert checks["device"][0] == checks["disk space for the state"][0] == "wrong"
    assert "training" not in checks


def test_a_slow_training_is_timed_by_the_steps_done_in_the_time_limit(
    server: Answers, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "MOST_SECONDS", 0.0)
    monkeypatch.setattr("fedssl.engine.local.PROGRESS_SECONDS", 0.0)
    checks = _by_name(_check(server.url, site, "--spec", _spec(site)))
    assert checks["training"][1].startswith("1 step, ")
    assert "metrics" not in checks


def test_the_time_per_step_excludes_the_time_before_the_first_report(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 15.0, 16.0, 18.0])
    monkeypatch.setattr("fedssl_worker.check.trial.time", SimpleNamespace(monotonic=lambda: next(times)))
    clock = trial.StepClock(images_per_step=16)
    clock.on_progress(_progress(step=20, images_per_second=1000.0))
    assert clock.seconds_per_step == 0.016  # from the speed in the only report
    clock = trial.StepClock(images_per_step=16)
    clock.on_progress(_progress(step=5))
    times = iter([20.0])
    clock.on_progress(_progress(step=9))
    assert clock.seconds_per_step == 0.5
    assert clock.num_steps == 9


def _progress(step: int, images_per_second: float = 1.0) -> LocalProgress:
    return LocalProgress(1, 1, step, 20, None, images_per_second)


def test_methods_with_labels_or_with_a_first_round_without_training_are_timed(server: Answers, site: Path) -> None:
    for name, keys in (("supervised", {"num_classes": 2}), ("orchestra", CONFIGS["orchestra"])):
        changes = {
            "method": {"name": name, **keys},
            "data": {"channels": 1, "image_size": 8},
            "training": {"batch_size": 16},
            "num_rounds": 2,
        }
        (site / "spec.json").write_text(method_spec(name, **changes).model_dump_json())
        found = _check(server.url, site, "--spec", site / "spec.json")
        assert found["seconds_per_round"] > 0, name


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "out of memory on cpu with batch size"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory on cpu with batch size"),
        (MethodError("loss is not a finite number: lower the rate"), "loss is not a finite number"),
    ],
)
def test_a_training_that_fails_is_a_problem(
    server: Answers, site: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(trial, "run_local_round", fail)
    found = _check(server.url, site, "--spec", _spec(site), code=1)
    assert words in _by_name(found)["training"][1]
    assert found["seconds_per_round"] is None


def test_public_images_that_only_the_coordinator_has_are_a_note(server: Answers, site: Path) -> None:
    public = {"dataset": "scans", "num_images": 8, "digest": "0" * 64}
    spec = _spec(site, method={"name": "fedca"}, public_data=public)
    assert _by_name(_check(server.url, site, "--spec", spec))["training"][0] == "note"


def test_a_check_exits_with_2_if_options_or_specs_cannot_be_read(server: Answers, site: Path) -> None:
    (site / "spec.toml").write_text("num_rounds = -1")
    given = ["--coordinator", server.url, "--data", site / "images", "--state", site / "state"]
    for arguments, words in (
        ([*given, "--spec", site / "spec.toml"], "num_rounds"),
        ([*given, "--spec", site / "none.toml"], "cannot read"),
        (given[:2], "--data: must be given"),
    ):
        result = CliRunner().invoke(app, ["check", *map(str, arguments)])
        assert (result.exit_code, words in result.stderr) == (2, True), result.output


def test_the_coordinator_is_reached_through_a_proxy_with_a_certificate(
    server: Answers, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(site)
    own, client = authority.sign("server", "192.0.2.1"), authority.sign("client")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.certificate, own.key)
    context.load_verify_locations(authority.file)
    context.verify_mode = ssl.CERT_REQUIRED
    port = server.server_port
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with ConnectProxy({"192.0.2.1:443": ("127.0.0.1", port)}) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://user:secret@127.0.0.1:{proxy.port}")
        trusted = ("--ca-file", authority.file)
        mutual = (*trusted, "--client-cert", client.certificate, "--client-key", client.key)
        reached = _by_name(_check("https://192.0.2.1", site, *mutual))
        assert reached["coordinator"][0] == "ok"
        assert f"proxy 127.0.0.1:{proxy.port}" in reached["coordinator"][1]
        assert "secret" not in reached["coordinator"][1]
        assert proxy.connected
        assert _by_name(_check("https://192.0.2.1", site, *trusted, code=1))["coordinator"][0] == "wrong"


def test_a_proxy_that_inspects_tls_is_trusted_only_if_its_authority_is_given(
    server: Answers, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, company = Authority(site), Authority(site, "company")
    own = ours.sign("server", "192.0.2.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.certificate, own.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    servers = {"192.0.2.1:443": ("127.0.0.1", server.server_port)}
    with InspectingProxy(servers, company.sign("inspection", "192.0.2.1")) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        for untrusted in ([], ["--ca-file", ours.file]):
            found = _by_name(_check("https://192.0.2.1", site, *untrusted, code=1))
            assert "shows a certificate that is not trusted" in found["coordinator"][1]
        assert proxy.seen == []
        assert _by_name(_check("https://192.0.2.1", site, "--ca-file", company.file))["coordinator"][0] == "ok"
        assert "GET /healthz HTTP/1.1" in proxy.seen


def test_numbers_are_kept_only_with_report_and_leave_only_as_the_policy_allows(server: Answers, site: Path) -> None:
    assert read_numbers(site / "state") is None
    found = _check(server.url, site, "--spec", _spec(site), "--report")
    numbers = read_numbers(site / "state")
    assert numbers is not None
    assert numbers.model_dump() == {
        "method": "fedalignuniform",
        "problems": 0,
        **{name: found[name] for name in ("update_bytes", "broadcast_bytes", "seconds_per_round")},
    }
    assert PolicyEnforcer(None, server.url).permitted_check(numbers) == numbers
    path = site / "policy.toml"
    path.write_text(POLICY.format(coordinator=server.url, rules=ALLOW))
    assert PolicyEnforcer(path, server.url).permitted_check(numbers) is None
    path.write_text(path.read_text().replace('"loss"', '"loss", "check/seconds_*"'))
    seconds = CheckNumbers(method="fedalignuniform", seconds_per_round=numbers.seconds_per_round)
    assert PolicyEnforcer(path, server.url).permitted_check(numbers) == seconds
    (site / "state" / "check.json").write_text("{")
    with pytest.raises(SettingsError, match=r"check\.json cannot be read"):
        read_numbers(site / "state")
