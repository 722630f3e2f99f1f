"""The bill of materials of an image, made from this environment, is valid, complete, and the same every time."""

import json
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
IMAGES = ("fedssl-api", "fedssl-aggregator", "fedssl-cli", "fedssl-worker", "fedssl-objects")


@cache
def _first_bill(name: str = "fedssl-api") -> str:
    return _bill(name)


def _bill(name: str = "fedssl-api") -> str:
    command = [sys.executable, ROOT / "deploy" / "sbom.py", name]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout


def test_the_bill_of_materials_is_valid_and_lists_everything_installed() -> None:
    text = _first_bill()
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    assert error is None, str(error)[:2000]
    document: dict[str, Any] = json.loads(text)
    assert document["metadata"]["component"]["name"] == "fedssl-api"
    found = {(component["name"], component["version"]) for component in document["components"]}
    installed = {(str(canonicalize_name(one.metadata["Name"])), one.version) for one in metadata.distributions()}
    assert installed <= found
    assert ("python", sys.version.split()[0]) in found
    purls = [component["purl"] for component in document["components"]]
    assert len(set(purls)) == len(purls)
    assert any(purl.startswith("pkg:pypi/torch@2.") for purl in purls)
    if Path("/var/lib/dpkg/status").exists():
        assert any(purl.startswith("pkg:deb/debian/libc6@") for purl in purls)


def test_the_same_environment_gives_the_same_bytes() -> None:
    assert _first_bill() == _bill()
    assert json.loads(_first_bill())["serialNumber"] != json.loads(_bill("fedssl-worker"))["serialNumber"]


def test_every_image_has_a_bill_of_materials() -> None:
    text = "".join(
        path.read_text() for path in [*ROOT.glob("services/*/Dockerfile"), *ROOT.glob("deploy/*/Dockerfile")]
    )
    for image in IMAGES:
        assert f"sbom.py {image}" in text
