"""Settings come from the environment, and secrets from files too."""

from collections.abc import Iterator
from pathlib import Path

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
