"""Print what a distribution needs from a package index, so that an image can install it before any source is copied.

    python requirements.py services/coordinator services/worker[extra] ...

Each argument is a folder with a pyproject.toml, optionally with extras. The project's own distributions are not
printed, but their requirements are.
"""

import re
import sys
import tomllib
from pathlib import Path

OWN = {
    "fedssl": "shared",
    "fedssl-coordinator": "services/coordinator",
    "fedssl-local": "services/local",
    "fedssl-worker": "services/worker",
}


def requirements(folder: str, extras: tuple[str, ...] = ()) -> set[str]:
    """Return the third-party requirements of the distribution in `folder` with these extras."""
    project = tomllib.loads((Path(folder) / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    found: set[str] = set()
    for requirement in wanted:
        name, own_extras = split(requirement)
        found |= requirements(OWN[name], own_extras) if name in OWN else {requirement}
    return found


def split(requirement: str) -> tuple[str, tuple[str, ...]]:
    """Split `fedssl[train]` into ("fedssl", ("train",)). A version is dropped."""
    match = re.match(r"([\w./-]+)(?:\[([\w,]+)\])?", requirement)
    assert match is not None, requirement
    return match[1], tuple(match[2].split(",")) if match[2] else ()


if __name__ == "__main__":
    print("\n".join(sorted(set().union(*(requirements(*split(argument)) for argument in sys.argv[1:])))))
