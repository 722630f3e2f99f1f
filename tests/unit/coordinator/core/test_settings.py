"""Settings are read from the environment, and secrets also from files."""

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from pydantic import ValidationError

from fedssl_coordinator.core.settings import settings


@pytest.fixture(autouse=True)
def _uncached_settings() -> Iterator[None]:
    settings.cache_clear()
    yield
    settings.cache_clear()


def _set_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSSL_DATABASE_URL", "postgresql+psycopg://host/fedssl")
    monkeypatch.setenv("FEDSSL_REDIS_URL", "redis://host")


def test_secrets_are_read_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fedssl_database_url").write_text("postgresql+psycopg://a:b@host/fedssl\n")
    (tmp_path / "fedssl_redis_url").write_text("redis://:c@host:6379/0\n")
    monkeypatch.delenv("FEDSSL_DATABASE_URL", raising=False)
    monkeypatch.setenv("FEDSSL_REDIS_URL", "redis://:d@elsewhere:6379/0")
    monkeypatch.setenv("FEDSSL_STORE_PATH", str(tmp_path))
    monkeypatch.setenv("FEDSSL_SECRETS_DIR", str(tmp_path))
    assert settings().database_url.get_secret_value() == "postgresql+psycopg://a:b@host/fedssl"
    assert settings().redis_url.get_secret_value() == "redis://:d@elsewhere:6379/0"  # the environment takes precedence


def test_empty_variables_are_not_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose passes variables that its own environment lacks as empty strings."""
    _set_addresses(monkeypatch)
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
def test_an_incompletely_configured_store_is_refused(
    changes: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_addresses(monkeypatch)
    monkeypatch.delenv("FEDSSL_STORE_PATH", raising=False)
    for name, value in changes.items():
        monkeypatch.setenv(f"FEDSSL_{name}", value)
    with pytest.raises(ValidationError, match=message):
        settings()


@pytest.mark.parametrize(
    ("name", "address", "message"),
    [
        ("DATABASE_URL", "postgres://a:hidden@host/fedssl", "must begin with postgresql\\+psycopg:// or postgresql://"),
        ("DATABASE_DIRECT_URL", "host=pg password=hidden", "must begin with postgresql\\+psycopg:// or postgresql://"),
        ("REDIS_URL", "redis://", "must begin with redis:// or rediss://"),
        *[
            ("DATABASE_URL", f"postgresql+psycopg://a:{password}@host:5432/fedssl", "cannot be read: it is postgresql")
            for password in ("hid@den", "hid/den", "hid?den", "hid#den", "12/den", "12?den", "12#den", "hid:den/")
        ],
        ("REDIS_URL", "redis://:hid@den@host:6379/0", "cannot be read: it is redis://USER"),
        ("REDIS_URL", "redis://:hidden@host:port/0", "cannot be read: it is redis://USER"),
    ],
)
def test_an_address_that_would_be_parsed_wrongly_is_refused_without_its_password(
    name: str, address: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_addresses(monkeypatch)
    monkeypatch.setenv("FEDSSL_STORE_PATH", str(tmp_path))
    monkeypatch.setenv(f"FEDSSL_{name}", address)
    with pytest.raises(ValidationError, match=f"FEDSSL_{name} {message}") as refused:
        settings()
    assert re.findall("hid|den|input", str(refused.value)) == []


@pytest.mark.parametrize(
    "address",
    [
        "postgresql+psycopg://a:b%40c%2F%23@host:5432/fedssl?sslmode=verify-full",
        "postgresql://[::1]:5432/fedssl",
        "postgresql+psycopg:///fedssl?host=/run/postgresql",
        "postgresql+psycopg://a:b:c@host/fedssl",
    ],
)
def test_valid_postgres_addresses_are_accepted(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _set_addresses(monkeypatch)
    monkeypatch.setenv("FEDSSL_STORE_PATH", str(tmp_path))
    monkeypatch.setenv("FEDSSL_DATABASE_URL", address)
    assert settings().database_url.get_secret_value() == address


def test_redis_certificate_authorities_need_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
