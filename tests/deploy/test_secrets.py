"""deploy/compose/secrets.sh, run in a folder in place of the volumes of its container."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "compose" / "secrets.sh"
KEYS = ("fedssl_s3_access_key_id", "fedssl_s3_secret_access_key")


class Volumes:
    """The volumes that compose mounts. `chown` only records its arguments, because changing an owner requires root."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._programs = folder / "programs"
        for name in ("secrets/postgres", "secrets/redis", "secrets/coordinator", "owned/store", "programs"):
            (folder / name).mkdir(parents=True)
        (self._programs / "chown").write_text(f'#!/bin/sh\necho "$@" >> {folder}/owners\n')
        (self._programs / "chown").chmod(0o755)

    def bring_an_object_store_along(self) -> None:
        """Mount one volume in two places, as compose.s3.yml does without FEDSSL_S3_KEYS."""
        (self.folder / "secrets" / "objects").mkdir()
        self.use_keys(self.folder / "secrets" / "objects")

    def use_keys(self, folder: Path) -> None:
        (self.folder / "keys").unlink(missing_ok=True)
        (self.folder / "keys").symlink_to(folder)

    def start(self, **variables: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(self._programs), str(Path(sys.executable).parent), os.environ["PATH"]])
        command = ["sh", str(SCRIPT), str(self.folder)]
        return subprocess.run(
            command, env={"PATH": path, **variables}, capture_output=True, text=True, check=False, timeout=60
        )

    def kept(self, name: str) -> dict[str, tuple[str, int]]:
        """Return the text and the permissions of each file in a folder of secrets."""
        files = (self.folder / "secrets" / name).iterdir()
        return {path.name: (path.read_text(), path.stat().st_mode & 0o777) for path in files}

    def coordinators_keys(self) -> list[str]:
        kept = self.kept("coordinator")
        return [kept[name][0] for name in KEYS]


@pytest.fixture
def volumes(tmp_path: Path) -> Volumes:
    (tmp_path / "volumes").mkdir()
    return Volumes(tmp_path / "volumes")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Return an operator's folder of keys, which no one else may read."""
    folder = tmp_path / "own"
    folder.mkdir(mode=0o700)
    for name in KEYS:
        _write(folder / name, f"own {name}")
    return folder


def _write(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o600)


def test_the_first_start_creates_all_secrets_and_later_ones_change_nothing(volumes: Volumes) -> None:
    volumes.bring_an_object_store_along()
    names = ("postgres", "redis", "coordinator", "objects")
    assert volumes.start().returncode == 0
    first = {name: volumes.kept(name) for name in names}
    assert volumes.start().returncode == 0
    assert {name: volumes.kept(name) for name in names} == first
    password, _ = first["postgres"]["password"]
    assert len(password) >= 40
    assert first["coordinator"]["fedssl_database_url"] == (
        f"postgresql+psycopg://fedssl:{password}@postgres:5432/fedssl",
        0o400,
    )
    assert {mode for _, mode in first["coordinator"].values()} == {0o400}
    made = {name: text for name, (text, _) in first["objects"].items()}
    assert volumes.coordinators_keys() == [made[name] for name in KEYS]


def test_no_keys_are_created_without_an_object_store(volumes: Volumes) -> None:
    assert volumes.start().returncode == 0
    assert set(volumes.kept("coordinator")) == {"fedssl_database_url", "fedssl_redis_url"}


def test_an_operators_keys_replace_the_created_ones(volumes: Volumes, own: Path) -> None:
    volumes.bring_an_object_store_along()
    volumes.start()
    bundled = volumes.kept("objects")
    volumes.use_keys(own)
    assert volumes.start().returncode == 0
    assert volumes.coordinators_keys() == [f"own {name}" for name in KEYS]
    _write(own / KEYS[0], "rotated")
    assert volumes.start().returncode == 0
    assert volumes.coordinators_keys() == ["rotated", f"own {KEYS[1]}"]
    assert volumes.kept("objects") == bundled
    volumes.use_keys(volumes.folder / "secrets" / "objects")
    assert volumes.start().returncode == 0
    assert volumes.coordinators_keys() == [bundled[name][0] for name in KEYS]


def test_an_operators_folder_of_keys_is_not_changed(volumes: Volumes, own: Path) -> None:
    volumes.bring_an_object_store_along()
    volumes.use_keys(own)
    assert volumes.start().returncode == 0
    assert own.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in own.iterdir()} == dict.fromkeys(KEYS, 0o600)


def test_a_missing_key_is_reported_and_not_created(volumes: Volumes, own: Path) -> None:
    volumes.bring_an_object_store_along()
    (own / KEYS[1]).rename(own / "secret")
    volumes.use_keys(own)
    done = volumes.start()
    assert done.returncode == 1
    assert done.stderr == f"error: the folder that FEDSSL_S3_KEYS names has no {KEYS[1]}, or it is empty\n"
    assert {path.name for path in own.iterdir()} == {KEYS[0], "secret"}


def test_volumes_belong_to_the_chosen_user(volumes: Volumes) -> None:
    assert volumes.start(FEDSSL_USER="1000:100").returncode == 0
    owners = (volumes.folder / "owners").read_text().splitlines()
    assert {"-R 1000:100 secrets/coordinator", "-R 1000:100 owned/store"} <= set(owners)


@pytest.mark.parametrize("user", ["ada", "1000", "1000:", ":100", "0:0", "1000:0", "1000:100:1", "1000:users", "$(id)"])
def test_a_user_that_is_not_a_pair_of_numbers_or_is_root_is_refused(volumes: Volumes, user: str) -> None:
    refused = volumes.start(FEDSSL_USER=user)
    assert refused.returncode == 1
    assert f"FEDSSL_USER={user} is not the numbers of a user and a group other than root" in refused.stderr
    assert not (volumes.folder / "owners").exists()


def test_a_results_folder_that_does_not_belong_to_root_keeps_its_owner(volumes: Volumes) -> None:
    results = volumes.folder / "owned" / "results"
    results.mkdir()
    (volumes._programs / "stat").write_text("#!/bin/sh\necho 1234:1234\n")
    (volumes._programs / "stat").chmod(0o755)
    assert volumes.start().returncode == 0
    assert "owned/results" not in (volumes.folder / "owners").read_text()
