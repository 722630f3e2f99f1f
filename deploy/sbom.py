"""Print the components of the environment that runs this, as CycloneDX 1.6 in JSON: the bill of materials of an image.

    python sbom.py NAME > sbom.cdx.json

Lists Python, every installed distribution, and the packages of the Debian system around it. The same environment gives
the same bytes.
"""

import json
import platform
import re
import sys
import sysconfig
import uuid
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from typing import Any

DPKG = Path("/var/lib/dpkg/status")
OS_RELEASE = Path("/etc/os-release")


def bill(name: str, version: str) -> dict[str, Any]:
    """Return the document for an image of this name."""
    found = [python(), *distributions(), *debian_packages()]
    components = sorted({component["bom-ref"]: component for component in found}.values(), key=lambda c: c["bom-ref"])
    subject = {"type": "container", "bom-ref": name, "name": name, "version": version}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": subject},
        "components": components,
    }
    return document | {"serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document)).urn}


def python() -> dict[str, Any]:
    """Return the component for the interpreter."""
    return component(
        "application", "python", platform.python_version(), f"pkg:generic/python@{platform.python_version()}"
    )


def distributions() -> list[dict[str, Any]]:
    """Return a component for each installed distribution, those of the interpreter outside of the environment too."""
    outside = sysconfig.get_path("purelib", vars={"base": sys.base_prefix, "platbase": sys.base_prefix})
    found = []
    for one in metadata.distributions(path=[*sys.path, outside]):
        name = re.sub(r"[-_.]+", "-", one.metadata["Name"]).lower()
        expression = one.metadata["License-Expression"]
        licenses = {"licenses": [{"expression": expression}]} if expression else {}
        found.append(component("library", name, one.version, f"pkg:pypi/{name}@{purl(one.version)}") | licenses)
    return found


def debian_packages() -> list[dict[str, Any]]:
    """Return a component for each package that dpkg has installed; none on other systems."""
    if not DPKG.exists():
        return []
    system = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', OS_RELEASE.read_text(encoding="utf-8"), re.MULTILINE))
    distribution = f"{system.get('ID', 'debian')}-{system.get('VERSION_ID', '')}".rstrip("-")
    found = []
    for text in DPKG.read_text(encoding="utf-8").split("\n\n"):
        fields = Parser().parsestr(text.strip("\n"), headersonly=True)
        if fields.get("Status", "").endswith(" installed"):
            name, version = fields["Package"], fields["Version"]
            place = f"pkg:deb/{system.get('ID', 'debian')}/{purl(name)}@{purl(version)}"
            qualifiers = f"?arch={fields['Architecture']}&distro={distribution}"
            found.append(component("library", name, version, place + qualifiers))
    return found


def component(kind: str, name: str, version: str, address: str) -> dict[str, Any]:
    """Return a component; its package URL is also its reference within the document."""
    return {"type": kind, "bom-ref": address, "name": name, "version": version, "purl": address}


def purl(text: str) -> str:
    """Return text as a part of a package URL.

    >>> purl("2.13.0+cpu")
    '2.13.0%2Bcpu'
    """
    return re.sub(r"[^A-Za-z0-9.~_-]", lambda match: f"%{ord(match[0]):02X}", text)


if __name__ == "__main__":
    print(json.dumps(bill(sys.argv[1], metadata.version("fedssl") if len(sys.argv) < 3 else sys.argv[2]), indent=1))
