"""Settings come from the environment, and secrets from files too."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedssl_coordinator.settings import settings


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
