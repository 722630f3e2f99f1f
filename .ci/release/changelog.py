"""The changelog: its section Unreleased becomes the section of a version."""

import datetime as dt
import re

from errors import ReleaseError

_UNRELEASED = re.compile(r"^## Unreleased\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def unreleased(text: str) -> str:
    """Return the entries that no version has yet. Raises ReleaseError if there are none."""
    match = _UNRELEASED.search(text)
    if match is None:
        raise ReleaseError('CHANGELOG.md has no section "## Unreleased"')
    if not re.search(r"^- ", match[1], re.MULTILINE):
        raise ReleaseError('CHANGELOG.md lists nothing under "## Unreleased": write what users of this version notice')
    return match[1].strip("\n")


def released(text: str, version: str, day: dt.date) -> str:
    """Return the changelog with these entries under the version, and an empty section for the next one."""
    entries = unreleased(text)
    return (
        _UNRELEASED.sub(lambda _: f"## Unreleased\n\n## {version} - {day.isoformat()}\n\n{entries}\n\n", text).rstrip()
        + "\n"
    )


def section(text: str, version: str) -> str:
    """Return the entries of a version. Raises ReleaseError if it has no section."""
    match = re.search(rf"^## {re.escape(version)} - \S+\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if match is None:
        raise ReleaseError(f'CHANGELOG.md has no section "## {version} - DATE": `make release` writes it')
    return match[1].strip("\n") + "\n"
