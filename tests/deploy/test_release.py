"""`make release` in its own repository, with real wheels, chart and signature. Images are written by the test."""

import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path
from types import ModuleType
from typing import Any

import helm_python as helm
import pytest
import yaml

pytestmark = pytest.mark.full


ROOT = Path(__file__).parents[2]
COMMAND = ROOT / ".ci" / "release"
NAMES = ("fedssl", "fedssl_coordinator", "fedssl_local", "fedssl_worker")


class Repository:
    """A clone that has one commit of the files of this working tree, and a maintainer's key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "repository"
        self.key = folder / "key"
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
        self._run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(self.key))
        self.allow(self.key)
        self.git("init", "--quiet", "--initial-branch=main")
        self.git("config", "user.name", "A maintainer")
        self.git("config", "user.email", "maintainer@example.org")
        self.git("config", "commit.gpgsign", "false")
        self.commit("Everything")

    @property
    def signers(self) -> Path:
        return self.folder / ".ci" / "release" / "allowed_signers"

    def allow(self, key: Path) -> None:
        public = key.with_name(f"{key.name}.pub").read_text().strip()
        with self.signers.open("a") as file:
            file.write(f'fedssl-release namespaces="fedssl-release" {public}\n')

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()

    def commit(self, message: str) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", message)

    def git(self, *arguments: str) -> str:
        return self._run("git", "-C", str(self.folder), *arguments).stdout

    def release(self, version: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(COMMAND / "release.py"), version, "--root", str(self.folder), "--images", "none"]
        return self._run(*command, *options, check=False)

    def state(self) -> tuple[str, ...]:
        """Return everything that a refused release must not change."""
        files = tuple(str(path) for path in self.folder.glob("dist/*"))
        return (
            *files,
            *(self.git(*words) for words in (["rev-parse", "HEAD"], ["tag"], ["status", "-s"], ["worktree", "list"])),
        )

    @staticmethod
    def _run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, check=check, timeout=240)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """Return a repository that has released 0.2.0-rc.1. Tests must not change it."""
    repository = Repository(tmp_path_factory.mktemp("made"))
    done = repository.release("0.2.0-rc.1", "--key", str(repository.key))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{repository.folder / 'dist' / '0.2.0-rc.1'}\n"
    assert "git push origin HEAD v0.2.0-rc.1" in done.stderr
    return repository


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """Return a repository in which no release has succeeded."""
    return Repository(tmp_path_factory.mktemp("fresh"))


def _folder(repository: Repository) -> Path:
    return repository.folder / "dist" / "0.2.0-rc.1"


def _verify(repository: Repository, folder: Path) -> list[int]:
    """Check a release with the commands of docs/releases.md, and return their exit statuses."""
    text = (ROOT / "docs" / "releases.md").read_text()
    commands = re.findall(r"^\$ (ssh-keygen -Y verify .*|sha256sum .*)$", text, re.MULTILINE)
    assert len(commands) == 2
    known = {"allowed_signers": str(repository.signers)}
    statuses = []
    for command in commands:
        words = [known.get(word, word) for word in command.split()]
        statuses.append(
            subprocess.run(["sh", "-c", " ".join(words)], cwd=folder, capture_output=True, check=False).returncode
        )
    return statuses


def test_a_release_creates_a_commit_a_tag_and_a_folder(made: Repository) -> None:
    wheels = {f"{name}-0.2.0rc1-py3-none-any.whl" for name in NAMES}
    files = {path.name for path in _folder(made).iterdir()}
    assert files == {*wheels, "fedssl-0.2.0-rc.1.tgz", "CHANGES.md", "SHA256SUMS", "SHA256SUMS.sig"}
    assert made.git("log", "-1", "--format=%s %D").strip() == "Release 0.2.0-rc.1 HEAD -> main, tag: v0.2.0-rc.1"
    assert made.git("status", "--porcelain") == ""
    assert len(made.git("worktree", "list").splitlines()) == 1
    changed = made.git("show", "--stat=200", "--format=", "HEAD")
    assert "CHANGELOG.md" in changed
    assert not re.search(
        r"\b0\.1\.0\b", made.git("grep", "--no-index", "-hE", "version|FEDSSL_VERSION", "--", "*.yml", "*.cff")
    )


def test_the_changelogs_entries_move_to_the_version(made: Repository) -> None:
    before = (ROOT / "CHANGELOG.md").read_text()
    after = made.read("CHANGELOG.md")
    day = made.git("log", "-1", "--format=%cs").strip()
    assert f"## Unreleased\n\n## 0.2.0-rc.1 - {day}\n\n### " in after
    assert after.replace(f"## Unreleased\n\n## 0.2.0-rc.1 - {day}\n", "## Unreleased\n") == before
    assert (_folder(made) / "CHANGES.md").read_text() in after


def test_wheels_install_into_a_fresh_environment(made: Repository, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = str(tmp_path / "venv" / "bin" / "python")
    wheels = [str(path) for path in _folder(made).glob("*.whl")]
    uv = str(Path(sys.executable).with_name("uv"))
    Repository._run(uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", python, *wheels)
    script = f"from importlib import metadata\nprint(*(metadata.version(name) for name in {NAMES}))"
    assert Repository._run(python, "-c", script).stdout.split() == ["0.2.0rc1"] * 4
    assert (tmp_path / "venv" / "bin" / "fedssl-coordinator").exists()
    [package] = (tmp_path / "venv").glob("lib/*/site-packages/fedssl_coordinator")
    assert list((package / "migrations").rglob("*.py"))


def test_the_packaged_chart_renders_with_its_files(made: Repository) -> None:
    with helm.Chart.load_archive((_folder(made) / "fedssl-0.2.0-rc.1.tgz").read_bytes()) as chart:
        values = {"image": {"registry": "registry.example.org/ml"}, "dashboard": {"enabled": True}}
        texts = chart.render(values, name="site", namespace="research")
    objects = [
        item for path, text in texts.items() if path.endswith(".yaml") for item in yaml.safe_load_all(text) if item
    ]
    assert "registry.example.org/ml/fedssl-api:0.2.0-rc.1" in str(objects)
    [dashboard] = [item["data"] for item in objects if item["metadata"]["name"].endswith("-dashboard")]
    assert dashboard == {"fedssl.json": made.read("deploy/grafana/fedssl.json")}
    with tarfile.open(_folder(made) / "fedssl-0.2.0-rc.1.tgz") as packed:
        assert not [name for name in packed.getnames() if "/ci/" in name]


def test_users_can_verify_a_release_and_detect_every_change(made: Repository, tmp_path: Path) -> None:
    folder = tmp_path / "downloaded"
    shutil.copytree(_folder(made), folder)
    assert _verify(made, folder) == [0, 0]
    names = sorted(path.name for path in folder.iterdir())
    for name in names:
        content = (folder / name).read_bytes()
        middle = len(content) // 2
        (folder / name).write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        assert any(_verify(made, folder)), name
        (folder / name).write_bytes(content)
    # A signature by another key is invalid, even if the checksums are right.
    (folder / "SHA256SUMS.sig").unlink()
    other = tmp_path / "other"
    Repository._run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other))
    Repository._run(
        "ssh-keygen", "-q", "-Y", "sign", "-f", str(other), "-n", "fedssl-release", str(folder / "SHA256SUMS")
    )
    assert _verify(made, folder)[0] != 0


def test_building_the_tag_again_gives_the_same_bytes(made: Repository, tmp_path: Path) -> None:
    again = tmp_path / "again"
    done = made.release("0.2.0-rc.1", "--tagged", "--sign", "none", "--out", str(again))
    assert done.returncode == 0, done.stderr
    assert "SIGN=none: this release is not signed" in done.stderr
    assert {path.name for path in _folder(made).iterdir()} - {path.name for path in again.iterdir()} == {
        "SHA256SUMS.sig"
    }
    for path in again.iterdir():
        assert path.read_bytes() == (_folder(made) / path.name).read_bytes(), path.name
    refused = made.release("0.2.0-rc.2", "--tagged", "--sign", "none", "--out", str(tmp_path / "other"))
    assert "the tag v0.2.0-rc.2 is not checked out: git checkout v0.2.0-rc.2" in refused.stderr


def test_a_version_and_its_changelog_entries_are_released_only_once(made: Repository) -> None:
    before = made.state()
    for version, message in (
        ("0.2.0-rc.1", "dist/0.2.0-rc.1 exists already"),
        ("0.1.0", "VERSION=0.1.0 is older than 0.2.0-rc.1"),
        ("0.2.0", 'CHANGELOG.md lists nothing under "## Unreleased"'),
    ):
        done = made.release(version, "--key", str(made.key))
        assert (done.returncode, done.stdout) == (1, "")
        assert message in done.stderr
    elsewhere = made.release("0.2.0-rc.1", "--key", str(made.key), "--out", str(made.folder.parent / "elsewhere"))
    assert "the tag v0.2.0-rc.1 exists already" in elsewhere.stderr
    assert made.state() == before


@pytest.mark.parametrize(
    ("version", "options", "message"),
    [
        ("v0.2.0", (), "VERSION='v0.2.0' is not a version of this project: give three numbers, such as 0.2.0"),
        ("0.2", (), "is not a version"),
        ("0.2.0rc1", (), "such as 0.2.0-rc.1"),
        ("0.02.0", (), "is not a version"),
        ("0.2.0\n", (), "is not a version"),
        ("0.2.0", (), "a release is signed: set KEY to your SSH key"),
        ("0.2.0", ("--key", "/nonexistent"), "there is no file /nonexistent: KEY is the path of your private SSH key"),
        ("0.2.0", ("--sign", "none", "--images", "api,web"), "IMAGES has web: choose from api, cli"),
    ],
)
def test_a_refused_release_changes_nothing(
    fresh: Repository, version: str, options: tuple[str, ...], message: str
) -> None:
    before = fresh.state()
    done = fresh.release(version, *options)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert fresh.state() == before


def test_a_key_that_users_do_not_know_is_refused_with_the_line_to_add(fresh: Repository, tmp_path: Path) -> None:
    Repository._run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other"))
    done = fresh.release("0.2.0", "--key", str(tmp_path / "other"))
    assert done.returncode == 1
    public = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    assert f'fedssl-release namespaces="fedssl-release" {public}' in done.stderr
    (tmp_path / "text").write_text("not a key\n")
    (tmp_path / "text").chmod(0o600)
    assert "ssh-keygen" in fresh.release("0.2.0", "--key", str(tmp_path / "text")).stderr


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "notes.txt",
            lambda text: "mine",
            "has changes that a release would not contain; commit them first:\n?? notes.txt",
        ),
        ("README.md", lambda text: text + "more", "M README.md"),
    ],
)
def test_a_tree_with_changes_is_refused(fresh: Repository, name: str, change: Any, message: str) -> None:
    path = fresh.folder / name
    before = path.read_text() if path.exists() else None
    path.write_text(change(before))
    done = fresh.release("0.2.0", "--key", str(fresh.key))
    fresh.git("clean", "--quiet", "--force") if before is None else path.write_text(before)
    assert done.returncode == 1
    assert message in done.stderr


def test_a_failed_build_leaves_no_commit_no_tag_and_no_folder(fresh: Repository) -> None:
    text = fresh.read("services/local/pyproject.toml")
    fresh.write("services/local/pyproject.toml", text.replace('packages = ["src/fedssl_local"]', "packages = 1"))
    fresh.commit("A project that cannot be built")
    before = fresh.state()
    done = fresh.release("0.2.0", "--key", str(fresh.key))
    after = fresh.state()
    fresh.git("reset", "--quiet", "--hard", "HEAD~1")
    assert done.returncode == 1
    assert "hatchling build --target wheel" in done.stderr
    assert after == before


def test_a_version_that_differs_in_one_file_is_reported(fresh: Repository) -> None:
    fresh.write("CITATION.cff", fresh.read("CITATION.cff").replace('version: "', 'version: "9'))
    fresh.commit("Another version")
    done = fresh.release("0.2.0", "--key", str(fresh.key))
    fresh.git("reset", "--quiet", "--hard", "HEAD~1")
    assert "the version is not the same everywhere" in done.stderr
    assert "CITATION.cff: 9" in done.stderr


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module that builds images."""
    monkeypatch.syspath_prepend(str(COMMAND))
    spec = importlib.util.spec_from_file_location("release_images", COMMAND / "images.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _archive(path: Path, *architectures: str) -> None:
    """Write an image for several platforms in the OCI layout, as a builder exports it."""
    with tarfile.open(path, "w") as packed:

        def add(name: str, content: bytes) -> None:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))

        def blob(content: bytes) -> dict[str, str]:
            digest = hashlib.sha256(content).hexdigest()
            add(f"blobs/sha256/{digest}", content)
            return {"digest": f"sha256:{digest}"}

        def layer(name: str, content: bytes) -> dict[str, str]:
            stream = io.BytesIO()
            with tarfile.open(fileobj=stream, mode="w:gz") as files:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                files.addfile(member, io.BytesIO(content))
            return blob(stream.getvalue())

        manifests = []
        for architecture in architectures:
            config = blob(json.dumps({"os": "linux", "architecture": architecture}).encode())
            layers = [layer("opt/fedssl/sbom.cdx.json", architecture.encode()), layer("var/empty", b"")]
            manifests.append(blob(json.dumps({"config": config, "layers": layers}).encode()))
        add("index.json", json.dumps({"manifests": [blob(json.dumps({"manifests": manifests}).encode())]}).encode())


def test_each_platform_of_an_archive_has_its_bill_of_materials(images: ModuleType, tmp_path: Path) -> None:
    _archive(tmp_path / "a.oci.tar", "amd64", "arm64")
    found = dict(images.bills_of_materials(tmp_path / "a.oci.tar"))
    assert found == {"linux-amd64": b"amd64", "linux-arm64": b"arm64"}
    assert re.fullmatch("sha256:[0-9a-f]{64}", images.digest(tmp_path / "a.oci.tar"))


@pytest.mark.parametrize(
    ("answer", "wanted", "platforms", "refusal"),
    [
        (
            "Driver: docker-container\nPlatforms: linux/amd64, linux/amd64/v2, linux/arm64",
            (),
            ("linux/amd64", "linux/arm64"),
            "",
        ),
        ("Driver: docker-container\nPlatforms: linux/amd64*, linux/386", (), ("linux/amd64",), ""),
        ("Driver: docker\nPlatforms: linux/amd64, linux/arm64", (), ("linux/amd64",), ""),
        (
            "Driver: docker\nPlatforms: linux/amd64",
            ("linux/arm64",),
            (),
            "cannot build for linux/arm64, only for linux/amd64",
        ),
        ("Driver: docker\nPlatforms: linux/riscv64", (), (), "can build for none of linux/amd64, linux/arm64"),
        ("ERROR", (), (), "names no driver or no platforms"),
    ],
)
def test_images_are_built_for_the_platforms_of_the_builder(
    images: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    wanted: tuple[str, ...],
    platforms: tuple[str, ...],
    refusal: str,
) -> None:
    (tmp_path / "docker").write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if refusal:
        with pytest.raises(Exception, match=refusal):
            images.find_builder(wanted)
    else:
        assert images.find_builder(wanted).platforms == platforms


# Like buildx, which takes a format with this beginning for one of its own.
BUILDX = """case "$*" in
*"--format {{.Manifest"*) printf 'Name: python\nDigest: sha256:%s\n' a ;;
*) echo sha256:DIGEST ;;
esac"""


@pytest.mark.parametrize(
    ("wanted", "script", "found", "refusal"),
    [
        ("", BUILDX.replace("DIGEST", "a" * 64), f"python:3.11-slim@sha256:{'a' * 64}", ""),
        ("mirror/python:3.11", f"echo sha256:{'b' * 64}", f"mirror/python:3.11@sha256:{'b' * 64}", ""),
        (f"python@sha256:{'c' * 64}", "exit 1", f"python@sha256:{'c' * 64}", ""),
        ("", "echo unreachable >&2; exit 1", "", "unreachable\nWithout its registry, set BASE_IMAGE"),
        ("", "echo nothing", "", "printed 'nothing', which is not a digest"),
    ],
)
def test_the_base_image_is_given_by_its_digest(
    images: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
    script: str,
    found: str,
    refusal: str,
) -> None:
    (tmp_path / "docker").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if refusal:
        with pytest.raises(Exception, match=refusal):
            images.base_image(ROOT, wanted)
    else:
        assert images.base_image(ROOT, wanted) == found


def test_the_digests_of_all_base_images_are_written(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "docker").write_text(f"#!/bin/sh\n{BUILDX.replace('DIGEST', 'a' * 64)}\n")
    (tmp_path / "docker").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["make", "image-digests"], cwd=tmp_path, env={**os.environ, "PATH": path}, check=True)
    lines = (tmp_path / "images.env").read_text().split()
    assert len(lines) == 7
    assert all(re.fullmatch(rf"FEDSSL_[A-Z]+_IMAGE=\S+:\S+@sha256:{'a' * 64}", line) for line in lines)


def test_the_workflow_runs_what_a_maintainer_can_run() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    workflow = yaml.safe_load(text)
    makefile = (ROOT / "Makefile").read_text()
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads the key `on` as true
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) == {"release-build", "release-push"}
    for target in ("release-build", "release-push"):
        assert f"\n{target}:" in makefile
    assert "vars.REGISTRY" in text
    for step in workflow["jobs"]["release"]["steps"]:
        # Expressions in a script would become part of the shell's text, so they are passed as variables.
        assert "${{" not in step.get("run", "")
        # An action of another repository is pinned to a commit, because a tag can be moved.
        assert re.fullmatch(r"actions/checkout@[0-9a-f]{40}", step.get("uses", "actions/checkout@" + "0" * 40))
