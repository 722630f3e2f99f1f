"""Settings come from the environment, and secrets from files too."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from pydantic import ValidationError

from fedssl_coordinator.core.settings import settings


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    settings.cache_clear()
    yield
    settings.cache_clear()


def test_secrets_are_read_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fedssl_database_url").write_text("postgresql+psycopg://a:b@host/fedssl\n")
    (tmp_path / "fedssl_redis_url").write_text("redis://:c@host:6379/0\n")
    monkeypatch.delenv("FEDSSL_DATABASE_URL", raising=False)
    monkeypatch.setenv("FEDSSL_REDIS_URL", "redis://:d@elsewhere:6379/0")
    monkeypatch.setenv("FEDSSL_STORE_PATH", str(tmp_path))
    monkeypatch.setenv("FEDSSL_SECRETS_DIR", str(tmp_path))
    assert settings().database_url.get_secret_value() == "postgresql+psycopg://a:b@host/fedssl"
    assert settings().redis_url.get_secret_value() == "redis://:d@elsewhere:6379/0"  # the environment wins


def test_empty_variables_are_not_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose passes on what its own environment lacks as empty."""
    for name in ("DATABASE_URL", "REDIS_URL"):
        monkeypatch.setenv(f"FEDSSL_{name}", "any")
    monkeypatch.setenv("FEDSSL_STORE_PATH", str(tmp_path))
    for name in ("ISSUER", "CLIENT_ID", "CLIENT_SECRET", "ROLES", "ROLES_CLAIM", "SCOPES"):
        monkeypatch.setenv(f"FEDSSL_OIDC_{name}", "")
    assert settings().oidc_issuer is None
    assert settings().oidc_roles_claim == "groups"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "set FEDSSL_STORE_PATH, a folder, or FEDSSL_STORE_URL, an object store"),
        ({"STORE_URL": "s3://b"}, "FEDSSL_STORE_URL needs FEDSSL_STORE_CACHE_PATH"),
        ({"STORE_URL": "s3://b:9000/p", "STORE_CACHE_PATH": "/c"}, "FEDSSL_STORE_URL: the object store's address has"),
        ({"STORE_PATH": "/a", "S3_ACCESS_KEY_ID": "k"}, "belong together"),
        ({"STORE_PATH": "/a", "STORE_DIRECT": "1"}, "FEDSSL_STORE_DIRECT needs FEDSSL_STORE_URL"),
    ],
)
def test_a_store_that_is_half_described(changes: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATABASE_URL", "REDIS_URL"):
        monkeypatch.setenv(f"FEDSSL_{name}", "any")
    monkeypatch.delenv("FEDSSL_STORE_PATH", raising=False)
    for name, value in changes.items():
        monkeypatch.setenv(f"FEDSSL_{name}", value)
    with pytest.raises(ValidationError, match=message):
        settings()


def test_authorities_of_redis_need_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authorities = tmp_path / "ca and more.crt"
    monkeypatch.setenv("FEDSSL_DATABASE_URL", "postgresql+psycopg://a:b@host/fedssl")
    monkeypatch.setenv("FEDSSL_STORE_PATH", str(tmp_path))
    monkeypatch.setenv("FEDSSL_REDIS_URL", "redis://:c@host:6379/0")
    monkeypatch.setenv("FEDSSL_REDIS_CA_FILE", str(authorities))
    with pytest.raises(ValidationError, match="redis_ca_file\n  Path does not point to a file"):
        settings()
    authorities.touch()
    with pytest.raises(ValidationError, match="FEDSSL_REDIS_URL must begin with rediss://"):
        settings()
    monkeypatch.setenv("FEDSSL_REDIS_URL", "rediss://:c@host:6379/0")
    address = settings().redis_address
    assert address.startswith("rediss://:c@host:6379/0?ssl_cert_reqs=required&ssl_ca_certs=")
    assert parse_qs(urlsplit(address).query)["ssl_ca_certs"] == [str(authorities)]
