"""The data owner's policy: what its file may contain, and what it keeps from being sent."""

import hashlib
from pathlib import Path

import pytest

from fedssl.artifacts.permission import permits_metric
from fedssl.client.errors import StoreUnreachable
from fedssl.protocol.work import Progress, Resources
from fedssl_worker.bootstrap import client_of
from fedssl_worker.disclosure.policy import NotPermitted, Policy, PolicyEnforcer, PolicyError, read_policy
from fedssl_worker.settings import Settings

from .conftest import make_item, make_spec

URL = "https://fed.example.org"
HEAD = f'schema = 1\nclient = "hospital-a"\ncoordinator = "{URL}"\n'
WEIGHTS = '[[allow]]\nartifact = "weights"\nmethods = ["fedbyol"]\n'

# The design's example, with the pin's fingerprint written out. This version does not enforce its last part yet.
DESIGNED = """
schema = 1
client = "hospital-a"
coordinator = "https://fed.example.org"
[[allow]]
artifact = "weights"
methods = ["fedbyol", "fedu"]
tensors = ["encoder.*", "predictor.*"]
secure = "required"
max_bytes = 67108864
max_rounds = 200
[metrics]
allow = []
[ledger]
sign = true
segment_entries = 1000
[secagg]
min_cohort = 5
collusion = 2
pins = { hospital-b = "ed25519:%s" }
[dp]
require = "none"
""" % ("a" * 64)
NOT_ENFORCED_YET = """
epsilon_max = "8"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "policy.toml"
    path.write_text(text)
    return path


# The file


def test_the_policy_file_of_the_design_is_read(tmp_path: Path) -> None:
    policy, digest = read_policy(written(tmp_path, DESIGNED))
    assert digest == hashlib.sha256(DESIGNED.encode()).hexdigest()
    assert policy.allow[0].model_dump(exclude={"datasets"}) == {
        "artifact": "weights",
        "methods": ("fedbyol", "fedu"),
        "tensors": ("encoder.*", "predictor.*"),
        "secure": "required",
        "max_bytes": 67108864,
        "max_rounds": 200,
    }
    assert policy.ledger.sign
    assert policy.ledger.segment_entries == 1000
    assert policy.dp.require == "none"
    secagg = {"min_cohort": 5, "collusion": 2, "pins": {"hospital-b": f"ed25519:{'a' * 64}"}}
    assert policy.secagg.model_dump() == secagg


def test_a_policy_file_saved_on_windows_is_read(tmp_path: Path) -> None:
    plain, _ = read_policy(written(tmp_path, DESIGNED))
    path = tmp_path / "windows.toml"
    path.write_bytes(b"\xef\xbb\xbf" + DESIGNED.replace("\n", "\r\n").encode())
    policy, digest = read_policy(path)
    assert policy == plain
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_keys_that_are_not_enforced_yet_are_refused_and_named_together(tmp_path: Path) -> None:
    with pytest.raises(PolicyError) as caught:
        read_policy(written(tmp_path, DESIGNED + NOT_ENFORCED_YET))
    for words in (
        "dp.epsilon_max: this version has no differential privacy and does not enforce this limit: remove epsilon_max",
        'set require = "example" in [dp]',
    ):
        assert words in str(caught.value)


_EPSILON = "dp.epsilon_max: this version has no differential privacy and does not enforce"


MISTAKES = {
    HEAD + "colour = 1\n": "colour: there is no such key",
    HEAD + WEIGHTS + "tensor = ['encoder.*']\n": "allow.0.tensor: there is no such key",
    HEAD + 'stores = ["s3.example.org"]\n': "stores.0",
    HEAD + 'stores = ["https://s3.example.org/bucket"]\n': "stores.0",
    HEAD + 'stores = ["https://s3.example.org:x"]\n': "stores.0",
    HEAD + 'stores = ["https://user@s3.example.org"]\n': "stores.0",
    HEAD + "[secagg]\nmincohort = 5\n": "secagg.mincohort: there is no such key",
    HEAD + "[secagg]\nmin_cohort = 2\n": "secagg.min_cohort",
    HEAD + "secagg = 5\n": "secagg: ",
    HEAD + '[dp]\nepsilon_max = "8"\n': _EPSILON,
    HEAD + '[dp]\nrequire = "example"\nepsilon_max = "8"\n': _EPSILON,
    HEAD + "[ledger]\nsing = true\n": "ledger.sing: there is no such key",
    HEAD.replace("schema = 1\n", ""): "schema: is missing",
    HEAD.replace("schema = 1", "schema = 2"): "schema: Input should be 1",
    HEAD.replace('client = "hospital-a"\n', ""): "client: is missing",
    HEAD.replace(f'coordinator = "{URL}"\n', ""): "coordinator: is missing",
    HEAD
    + '[[allow]]\nartifact = "images"\nmethods = ["*"]\n': "allow.0.artifact: Input should be 'weights', 'centers'",
    HEAD + '[[allow]]\nartifact = "weights"\n': "allow.0.methods: is missing",
    HEAD + '[[allow]]\nartifact = "weights"\nmethods = []\n': "allow.0.methods",
    HEAD + '[[allow]]\nartifact = "weights"\nmethods = ["fedbyoll"]\n': "there is no method fedbyoll",
    HEAD + '[[allow]]\nartifact = "weights"\nmethods = ["[ab]"]\n': "allow.0.methods.0",
    HEAD + WEIGHTS + "max_bytes = 0\n": "allow.0.max_bytes",
    HEAD + WEIGHTS + 'secure = "maybe"\n': "allow.0.secure",
    HEAD + '[[allow]]\nartifact = "metrics"\nmethods = ["*"]\nmax_bytes = 5\n': "not max_bytes",
    HEAD + '[dp]\nrequire = "client"\n': "dp.require",
    HEAD + '[dp]\nepsilon_max = "eight"\n': _EPSILON,
    HEAD + "[dp]\nepsilon_max = 8.0\n": _EPSILON,
    HEAD + '[secagg]\npins = { hospital-b = "sha256:00" }\n': "secagg.pins.hospital-b",
    HEAD + "[ledger]\nsegment_entries = 1\n": "ledger.segment_entries",
    "schema = ": "is not TOML",
    "\x00": "is not TOML",
    "schema = " + "9" * 5000: "is not TOML",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_an_invalid_policy_is_refused_with_the_reason(tmp_path: Path, text: str) -> None:
    with pytest.raises(PolicyError) as caught:
        PolicyEnforcer(written(tmp_path, text), URL)
    assert MISTAKES[text] in str(caught.value)
    assert "policy.toml" in str(caught.value)


def test_a_file_that_is_not_a_policy_is_refused(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "missing", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(PolicyError, match=words):
            PolicyEnforcer(path, URL)
    large = tmp_path / "large"
    large.write_bytes(b"#" * (2 << 20))
    with pytest.raises(PolicyError, match="right file"):
        PolicyEnforcer(large, URL)
    large.write_bytes(b"\xff")
    with pytest.raises(PolicyError, match="not TOML"):
        PolicyEnforcer(large, URL)


# Whose it is, and for whom


@pytest.mark.parametrize(
    ("written_so", "started_so"),
    [
        ("https://fed.example.org", "https://fed.example.org/"),
        ("https://fed.example.org:443", "https://FED.example.org"),
        ("http://127.0.0.1:80/base/", "http://127.0.0.1/base"),
    ],
)
def test_different_forms_of_the_same_address_are_accepted(tmp_path: Path, written_so: str, started_so: str) -> None:
    PolicyEnforcer(written(tmp_path, HEAD.replace(URL, written_so)), started_so)


@pytest.mark.parametrize(
    "other",
    ["http://fed.example.org", "https://fed.example.org:8443", "https://fed.example.org.evil.net",
     "https://example.org", "https://fed.example.org/other", "https://fed.example.org:x"],
)  # fmt: skip
def test_another_coordinator_is_refused(tmp_path: Path, other: str) -> None:
    with pytest.raises(PolicyError, match="but this worker was started for"):
        PolicyEnforcer(written(tmp_path, HEAD), other)


def test_another_clients_policy_is_refused(tmp_path: Path) -> None:
    enforcer = PolicyEnforcer(written(tmp_path, HEAD), URL)
    enforcer.require_client("hospital-a")
    with pytest.raises(PolicyError, match=r"for the client hospital-a, but this worker's token is for hospital-b:"):
        enforcer.require_client("hospital-b")


def test_a_policy_is_read_again_only_by_reload(tmp_path: Path) -> None:
    item = make_item(make_spec(), 1)
    path = written(tmp_path, HEAD + WEIGHTS)
    enforcer = PolicyEnforcer(path, URL)
    first = enforcer.digest
    assert not enforcer.reload()
    written(tmp_path, HEAD)
    enforcer.require_permitted(item)  # the assignment began under this policy, which still applies
    assert enforcer.reload()
    assert enforcer.digest != first
    with pytest.raises(NotPermitted):
        enforcer.require_permitted(item)
    written(tmp_path, HEAD + "odd = 1\n")
    with pytest.raises(PolicyError, match="odd"):
        enforcer.reload()
    path.unlink()
    with pytest.raises(PolicyError, match="No such file"):
        enforcer.reload()
    written(tmp_path, HEAD.replace(URL, "https://elsewhere.org"))
    with pytest.raises(PolicyError, match="but this worker was started for"):
        enforcer.reload()


def test_without_a_policy_file_all_work_and_all_numbers_are_permitted() -> None:
    enforcer = PolicyEnforcer(None, URL)
    item = make_item(make_spec(), 1)
    progress = Progress(phase="training", epoch=1, num_epochs=1, step=1, num_steps=2, loss=0.5, images_per_second=9.0)
    enforcer.require_permitted(item)
    assert (enforcer.digest, enforcer.notice) == ("none", None)
    assert enforcer.permitted_metrics(item, {"loss": 1.0, "rank/encoder": 2.0}) == {"loss": 1.0, "rank/encoder": 2.0}
    assert enforcer.permitted_progress(item, progress) is progress


STORES = 'stores = ["https://s3.example.org/", "https://[2001:db8::1]:9000", "https://store.example.org:9000"]\n'


@pytest.mark.parametrize(
    ("server", "may_go"),
    [
        ("https://s3.example.org", True),
        ("https://S3.example.org:443", True),
        ("https://store.example.org:9000", True),
        ("https://[2001:db8::1]:9000", True),
        ("http://s3.example.org", False),
        ("https://s3.example.org:9000", False),
        ("https://s3.example.org.evil.net", False),
        ("https://intranet", False),
        (URL, False),
    ],
)
def test_only_object_stores_that_the_policy_names_are_permitted(tmp_path: Path, server: str, *, may_go: bool) -> None:
    enforcer = PolicyEnforcer(written(tmp_path, HEAD), URL)
    assert not enforcer.permits_store(server)
    written(tmp_path, HEAD + STORES)
    enforcer.reload()
    assert enforcer.permits_store(server) == may_go
    assert PolicyEnforcer(None, URL).permits_store(server)


def test_a_worker_refuses_object_stores_that_its_policy_does_not_name(tmp_path: Path) -> None:
    path = written(tmp_path, HEAD + STORES)
    settings = Settings(coordinator=URL, data="", state=tmp_path, policy=path)
    with client_of(settings, "token", PolicyEnforcer(path, URL)) as client:
        transfer = client._connection.direct_transfer
        assert transfer._permitted("https://s3.example.org/bucket/key?signature=x").host == "s3.example.org"
        with pytest.raises(StoreUnreachable, match="policy does not name https://intranet,"):
            transfer._permitted("https://intranet/a")


# What the policy withholds


def test_a_policy_denies_everything_by_default(tmp_path: Path) -> None:
    enforcer = PolicyEnforcer(written(tmp_path, HEAD), URL)
    item = make_item(make_spec(), 1)
    with pytest.raises(NotPermitted, match="no rule allows weights of fedbyol"):
        enforcer.require_permitted(item)
    assert enforcer.permitted_metrics(item, {"loss": 1.0}) == {}


def test_required_privacy_in_the_file_refuses_all_work(tmp_path: Path) -> None:
    text = HEAD + '[[allow]]\nartifact = "weights"\nmethods = ["*"]\n[dp]\nrequire = "example"\n'
    enforcer = PolicyEnforcer(written(tmp_path, text), URL)
    with pytest.raises(NotPermitted, match="no work is accepted"):
        enforcer.require_permitted(make_item(make_spec(), 1))


def test_required_secure_aggregation_refuses_what_its_rule_covers(tmp_path: Path) -> None:
    enforcer = PolicyEnforcer(written(tmp_path, HEAD + WEIGHTS + 'secure = "required"\n'), URL)
    with pytest.raises(NotPermitted, match="secure aggregation"):
        enforcer.require_permitted(make_item(make_spec(), 1))
    masked = make_spec(aggregation={"arithmetic": "fixed"}, secure_aggregation={"min_cohort": 3})
    item = make_item(masked, 1)
    enforcer.require_permitted(item)
    assert enforcer.permitted_metrics(item, {"loss": 1.0}) == {}
    assert enforcer.reportable(item) == []


def test_metrics_are_permitted_by_name_for_all_methods_or_for_some(tmp_path: Path) -> None:
    text = (
        HEAD
        + '[[allow]]\nartifact = "metrics"\nmethods = ["fedbyol"]\ntensors = ["rank/*"]\n[metrics]\nallow = ["loss*"]\n'
    )
    enforcer = PolicyEnforcer(written(tmp_path, text), URL)
    values = {"loss": 1.0, "loss_terms/byol": 2.0, "rank/encoder": 3.0, "images": 4.0}
    item = make_item(make_spec(), 1)
    assert enforcer.permitted_metrics(item, values) == {k: v for k, v in values.items() if k != "images"}
    other = make_item(make_spec({"name": "fedsimclr"}), 1)
    assert enforcer.permitted_metrics(other, values) == {"loss": 1.0, "loss_terms/byol": 2.0}
    assert enforcer.notice is not None
    assert permits_metric(enforcer.notice, "fedx", "loss")
    assert not permits_metric(enforcer.notice, "fedx", "rank/encoder")


@pytest.mark.parametrize(
    ("allow", "kept"),
    [("[]", {"loss", "images_per_second"}), ('["loss"]', {"images_per_second"}), ('["*"]', set())],
)
def test_progress_contains_only_permitted_metrics(tmp_path: Path, allow: str, kept: set[str]) -> None:
    enforcer = PolicyEnforcer(written(tmp_path, HEAD + WEIGHTS + f"[metrics]\nallow = {allow}\n"), URL)
    progress = Progress(phase="training", epoch=1, num_epochs=1, step=1, num_steps=2, loss=0.5, images_per_second=9.0)
    told = enforcer.permitted_progress(make_item(make_spec(), 1), progress)
    assert {name for name in ("loss", "images_per_second") if getattr(told, name) is None} == kept
    assert (told.step, told.num_steps) == (1, 2)


def test_progress_in_a_secure_round_is_the_same_for_any_number_of_steps(tmp_path: Path) -> None:
    """Percentages of few steps would reveal the number of steps and, with the batch size, the number of images."""
    enforcer = PolicyEnforcer(written(tmp_path, HEAD + WEIGHTS), URL)
    item = make_item(make_spec(aggregation={"arithmetic": "fixed"}, secure_aggregation={"min_cohort": 3}), 1)

    def reports(steps_per_epoch: int) -> list[Progress]:
        """Return the distinct reports in order: heartbeats send the newest one every few seconds."""
        found: list[Progress] = []
        for step in range(1, 4 * steps_per_epoch + 1):
            epoch = -(-step // steps_per_epoch)
            whole = Progress(phase="training", epoch=epoch, num_epochs=4, step=step, num_steps=4 * steps_per_epoch)
            told = enforcer.permitted_progress(item, whole)
            found += [told] if told not in found else []
        return found

    assert reports(3) == reports(7) == reports(100)
    assert [(each.step, each.num_steps) for each in reports(3)] == [(0, 100), (25, 100), (50, 100), (75, 100)]


def test_no_number_of_one_client_leaves_in_a_secure_round(tmp_path: Path) -> None:
    item = make_item(make_spec(aggregation={"arithmetic": "fixed"}, secure_aggregation={"min_cohort": 3}), 1)
    progress = Progress(phase="training", epoch=1, num_epochs=1, step=1, num_steps=2, loss=0.5, images_per_second=9.0)
    for path in (None, written(tmp_path, HEAD + WEIGHTS + '[metrics]\nallow = ["*"]\n')):
        enforcer = PolicyEnforcer(path, URL)
        assert enforcer.permitted_metrics(item, {"loss": 0.5}) == {}
        told = enforcer.permitted_progress(item, progress)
        assert (told.loss, told.images_per_second) == (None, None)
        assert enforcer.permitted_resources(item, Resources(memory_bytes=1)) is None
        assert enforcer.reportable(item) == []


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(ValueError, match="extra"):
        Policy.model_validate({"schema": 1, "client": "a", "coordinator": URL, "version": 1})
