"""The zip file that a data owner's site uses to join."""

import io
import stat
import tomllib
import zipfile
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from fedssl.cli.errors import UsageError
from fedssl.cli.kit import Kit, kit_for, write_kit
from fedssl_worker.disclosure.policy import Policy, read_policy
from fedssl_worker.settings import Settings
from support.certificates import Authority

ADDRESS = "https://fedssl.example.org:8443/api"
EXPIRES = datetime(2026, 11, 24, 14, 30, tzinfo=UTC)
SECRET = "fedssl_a-secret"


def unzip(kit: Kit, folder: Path) -> Path:
    """Unpack a kit as `unzip` does, with the file modes it contains."""
    with zipfile.ZipFile(io.BytesIO(kit.zipped(SECRET, EXPIRES))) as archive:
        archive.extractall(folder)
        for entry in archive.infolist():
            (folder / entry.filename).chmod(stat.S_IMODE(entry.external_attr >> 16))
    return folder / f"fedssl-{kit.client}"


def settings(folder: Path) -> dict[str, str]:
    lines = (folder / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_a_kit_is_the_folder_of_one_site(tmp_path: Path) -> None:
    folder = unzip(kit_for("hospital-a", ADDRESS, None, None), tmp_path)
    names = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    assert names == {".env", "README.md", "docker-compose.yml", "gpu.yml", "images", "site", "site/policy.toml"}
    assert settings(folder) == {
        "COMPOSE_PROJECT_NAME": "fedssl-hospital-a",
        "FEDSSL_WORKER_IMAGE": "fedssl-worker:0.1.0",
        "FEDSSL_COORDINATOR": ADDRESS,
        "FEDSSL_ENROLMENT_TOKEN": SECRET,
        "FEDSSL_IMAGES": "./images",
        "FEDSSL_POLICY": "policy.toml",
    }
    readme = (folder / "README.md").read_text()
    for word in ("hospital-a", ADDRESS, "2026-11-24 14:30 UTC", "fedssl-worker:0.1.0", "$ docker compose up"):
        assert word in readme
    assert SECRET not in "".join(
        path.read_text() for path in folder.rglob("*") if path.is_file() and path.name != ".env"
    )


def test_only_the_owner_can_read_the_token_and_the_container_can_read_the_rest(tmp_path: Path) -> None:
    folder = unzip(kit_for("hospital-a", ADDRESS, None, None), tmp_path)
    modes = {
        str(path.relative_to(tmp_path)): stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))
    }
    top = folder.name
    assert modes.pop(top) == 0o700
    assert modes.pop(f"{top}/.env") == 0o600
    assert modes.pop(f"{top}/site") == modes.pop(f"{top}/images") == 0o755
    assert set(modes.values()) == {0o644}


def test_a_worker_can_read_the_policy_and_it_allows_nothing_until_it_is_edited(tmp_path: Path) -> None:
    path = unzip(kit_for("hospital-a", ADDRESS, None, None), tmp_path) / "site/policy.toml"
    policy, _ = read_policy(path)
    assert (policy.client, policy.coordinator, policy.allow) == ("hospital-a", ADDRESS, ())
    edited = path.read_text().replace("\n#[[", "\n[[").replace("\n#[m", "\n[m")
    keys = (
        "artifact",
        "methods",
        "max_bytes",
        "max_rounds",
        "allow",
        "max_bytes_total",
        "max_evaluations_total",
        "max_rounds_total",
        "min_count",
    )
    for key in keys:
        edited = edited.replace(f"\n#{key} ", f"\n{key} ")
    allowed = Policy.model_validate(tomllib.loads(edited))
    found = [(rule.artifact, rule.min_count) for rule in allowed.allow]
    assert found == [("weights", None), ("evaluation", 10), ("statistics", 10), ("channel-sums", 10)]
    assert allowed.max_rounds_total == 1000
    assert allowed.metrics.allow == ("loss",)


def test_every_setting_of_the_compose_file_is_explained(tmp_path: Path) -> None:
    folder = unzip(kit_for("hospital-a", ADDRESS, None, None), tmp_path)
    text = (folder / "docker-compose.yml").read_text() + (folder / "gpu.yml").read_text()
    named = {part.split(":")[0].split("}")[0] for part in text.split("${")[1:]}
    explained = (folder / ".env").read_text()
    assert {name for name in named if f"{name}=" not in explained} == {"FEDSSL_SITE"}
    assert yaml.safe_load(text.split("# With a GPU")[0])["services"]["worker"]["environment"]["FEDSSL_STAY_UNHEALTHY"]


def test_the_workers_settings_are_variables_of_the_kit_or_keep_their_defaults(tmp_path: Path) -> None:
    folder = unzip(kit_for("hospital-a", ADDRESS, None, None), tmp_path)
    services = yaml.safe_load((folder / "docker-compose.yml").read_text())["services"]
    given = {name.removeprefix("FEDSSL_WORKER_").lower() for name in services["worker"]["environment"]}
    fields = set(Settings.model_fields)
    assert {name for name in given if name.isidentifier()} - fields == {
        "fedssl_stay_unhealthy",
        "https_proxy",
        "no_proxy",
    }
    assert fields - given == {
        "state",  # the volume, whose path the image sets
        "enrolment_token_file", "token", "token_file",  # the kit has an enrolment token
        "insecure_http",  # the address begins with https
        "public_data", "max_public_bytes", "max_artifact_bytes", "claim_seconds", "retry_seconds", "keep_ended_seconds",
        "log_level", "metrics_port", "metrics_host",
    }  # fmt: skip


def test_the_page_reads_the_workers_files_and_listens_only_on_this_machine(tmp_path: Path) -> None:
    folder = unzip(kit_for("hospital-a", ADDRESS, None, None), tmp_path)
    services = yaml.safe_load((folder / "docker-compose.yml").read_text())["services"]
    worker, page = services["worker"], services["page"]
    assert page["network_mode"] == "host"
    assert "ports" not in page
    assert (page["image"], page["user"]) == (worker["image"], worker["user"])
    assert page["volumes"] == ["${FEDSSL_SITE:-./site}:/site:ro", "${FEDSSL_STATE:-state}:/state:ro"]
    assert page["environment"] == {"FEDSSL_WORKER_POLICY": worker["environment"]["FEDSSL_WORKER_POLICY"]}
    assert "docker compose run --rm page" in (folder / "README.md").read_text()


def test_a_private_certificate_authority_is_included(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    folder = unzip(kit_for("a", ADDRESS, "registry.example.org/ml/fedssl-worker:0.1.0-cuda", authority.file), tmp_path)
    assert (folder / "site/ca.crt").read_bytes() == authority.file.read_bytes()
    assert settings(folder)["FEDSSL_CA"] == "ca.crt"
    assert settings(folder)["FEDSSL_WORKER_IMAGE"] == "registry.example.org/ml/fedssl-worker:0.1.0-cuda"


def test_the_authoritys_certificate_is_read_from_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    for content in (authority.file.read_bytes(), b""):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        if content:
            assert kit_for("a", ADDRESS, None, Path("-")).ca == content
        else:  # the command that should have printed it failed
            with pytest.raises(UsageError, match="--ca - cannot be used"):
                kit_for("a", ADDRESS, None, Path("-"))


@pytest.mark.parametrize(
    ("client", "address", "image", "words"),
    [
        ("../../etc", ADDRESS, None, "CLIENT: '../../etc' is not a client's name"),
        ("a", "http://fedssl.example.org", None, "give the coordinator's https:// address"),
        ("a", "https://fedssl.example.org\nFEDSSL_POLICY=", None, "is not an address"),
        ("a", 'https://x"', None, "is not an address"),
        ("a", ADDRESS, "worker\nFEDSSL_POLICY=", "this is not an image's name"),
    ],
)
def test_values_that_do_not_fit_into_the_files_are_refused(
    client: str, address: str, image: str | None, words: str
) -> None:
    with pytest.raises(UsageError) as refused:
        kit_for(client, address, image, None)
    assert words in str(refused.value)


def test_a_file_without_certificates_or_with_a_key_is_refused(tmp_path: Path) -> None:
    pair = Authority(tmp_path).sign("api", "127.0.0.1")
    both = tmp_path / "both.pem"
    both.write_bytes(pair.certificate.read_bytes() + pair.key.read_bytes())
    large = tmp_path / "large.pem"
    large.write_bytes(b"#" * (1 << 21))
    for path, words in (
        (both, "contains a private key, which must not be sent"),
        (pair.key, "cannot be used"),
        (tmp_path / "missing.pem", "No such file"),
        (large, "has more than"),
    ):
        with pytest.raises(UsageError, match=words):
            kit_for("a", ADDRESS, None, path)


def test_only_the_owner_can_read_the_zip_file(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    write_kit(tmp_path / "kit.zip", b"content")
    assert stat.S_IMODE((tmp_path / "kit.zip").stat().st_mode) == 0o600
    write_kit(Path("-"), b"content")
    assert capfdbinary.readouterr().out == b"content"
