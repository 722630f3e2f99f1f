"""The project's version, and every place where it stands."""

import re
from functools import partial
from pathlib import Path

from errors import ReleaseError
from packaging.version import InvalidVersion, Version

_PLACES = {
    "shared/pyproject.toml": r'^version = "(.+)"$',
    "services/coordinator/pyproject.toml": r'^version = "(.+)"$',
    "services/local/pyproject.toml": r'^version = "(.+)"$',
    "services/worker/pyproject.toml": r'^version = "(.+)"$',
    "helm/fedssl/Chart.yaml": r"^(?:version|appVersion): (.+)$",
    "CITATION.cff": r'^version: "(.+)"$',
    "docker-compose.yml": r"\$\{FEDSSL_VERSION:-(.+?)\}",
    "compose.gpu.yml": r"\$\{FEDSSL_VERSION:-(.+?)\}",
    "compose.s3.yml": r"\$\{FEDSSL_VERSION:-(.+?)\}",
    "deploy/join/docker-compose.yml": r"fedssl-worker:(\d[^}\s]*)",
    "docs/deploy.md": r"(?:fedssl-[a-z]+:|tag: |`)(\d+\.\d+\.\d+(?:-(?:alpha|beta|rc)\.\d+)?)(?=-cuda| )",
}
_SEMANTIC = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-(alpha|beta|rc)\.(0|[1-9]\d*))?")


def parse(text: str) -> Version:
    """Return the version. It is a semantic version, as charts and image tags need, that Python packages can have too.

    >>> str(parse("1.2.0-rc.1"))
    '1.2.0rc1'
    """
    if not _SEMANTIC.fullmatch(text):
        raise ReleaseError(
            f"VERSION={text!r} is not a version of this project: give three numbers, such as 0.2.0, or a release "
            "candidate, such as 0.2.0-rc.1 (also -alpha.N and -beta.N)"
        )
    return Version(text)


def current(root: Path) -> str:
    """Return the version that stands everywhere. Raises ReleaseError if two places disagree or one has none."""
    found = {
        path: set(re.findall(pattern, (root / path).read_text(), re.MULTILINE)) for path, pattern in _PLACES.items()
    }
    for path, versions in found.items():
        if not versions:
            raise ReleaseError(f"{path} no longer contains the version: adapt .ci/release/versions.py")
    try:
        different = {Version(version) for versions in found.values() for version in versions}
    except InvalidVersion as error:
        raise ReleaseError(f"the files have a version that is not one: {error}") from None
    if len(different) > 1:
        listed = "\n".join(f"  {path}: {', '.join(sorted(versions))}" for path, versions in found.items())
        raise ReleaseError(f"the version is not the same everywhere:\n{listed}")
    return str(found["helm/fedssl/Chart.yaml"].pop())


def write(root: Path, version: str) -> None:
    """Write the version to every place, in the form that is usual there."""
    for path, pattern in _PLACES.items():
        file = root / path
        form = str(parse(version)) if file.suffix == ".toml" else version
        file.write_text(re.sub(pattern, partial(_replace, form), file.read_text(), flags=re.MULTILINE))


def _replace(version: str, match: re.Match[str]) -> str:
    return match[0].replace(match[1], version)


def check_is_newer(version: str, before: str) -> None:
    """Raise ReleaseError if `version` is older than `before`, the version that the files have."""
    if Version(version) < Version(before):
        raise ReleaseError(f"VERSION={version} is older than {before}, which the files already have")
