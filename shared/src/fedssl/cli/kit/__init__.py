"""The folder with which a data owner's site joins, as a zip file: `fedssl token enrol CLIENT --kit FILE`.

`files` is also `deploy/join` of the project. In its texts, placeholders such as `$coordinator` stand for what differs
between sites.
"""

import io
import re
import ssl
import sys
import zipfile
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from string import Template

from fedssl.cli.errors import UsageError

_TEXTS = {
    "README.md": "README.md",
    ".env": "env.example",
    "site/policy.toml": "site/policy.toml",
}
_COPIES = ("docker-compose.yml", "gpu.yml")
_ADDRESS = re.compile(r"https://[A-Za-z0-9.-]+(:\d{1,5})?(/[A-Za-z0-9._~/-]*)?|https://\[[0-9A-Fa-f:.]+\](:\d{1,5})?/?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
_CLIENT = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")  # as fedssl.protocol.base.ClientId
_MAX_CA_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Kit:
    """The content of a site's folder, except for the token. `ca`: certificates in PEM; empty for public authorities."""

    client: str
    coordinator: str
    image: str
    ca: bytes = b""

    def zipped(self, token: str, expires: datetime | None) -> bytes:
        """Return the zip file. Its folder, and the file with the token, are for their owner only."""
        values = {
            "client": self.client,
            "coordinator": self.coordinator,
            "expires": "no limit" if expires is None else f"{expires.astimezone(UTC):%Y-%m-%d %H:%M} UTC",
            "image": self.image,
            "no_ca": "" if self.ca else "#",
            "project": f"fedssl-{self.client}",
            "token": token,
        }
        files = resources.files(__name__).joinpath("files")
        contents = {name: files.joinpath(name).read_bytes() for name in _COPIES}
        for name, source in _TEXTS.items():
            text = files.joinpath(source).read_text(encoding="utf-8")
            contents[name] = Template(text).substitute(values).encode()
        if self.ca:
            contents["site/ca.crt"] = self.ca
        top = f"fedssl-{self.client}/"
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            for folder, mode in ((top, 0o700), (f"{top}site/", 0o755), (f"{top}images/", 0o755)):
                file.writestr(_entry(folder, 0o40000 | mode), b"")
            for name, content in contents.items():
                file.writestr(_entry(top + name, 0o100000 | (0o600 if name == ".env" else 0o644)), content)
        return archive.getvalue()


def kit_for(client: str, coordinator: str, image: str | None, ca: Path | None) -> Kit:
    """Return the kit for these options. Raises UsageError, before anything was created or revoked."""
    if not _CLIENT.fullmatch(client):
        raise UsageError(
            f"CLIENT: {client!r} is not a client's name: use at most 63 lower-case letters, digits and hyphens"
        )
    if not _ADDRESS.fullmatch(coordinator):
        raise UsageError(
            f"--kit: {coordinator} is not an address that another site can use: give the coordinator's https:// "
            "address there with --address"
        )
    image = image or f"fedssl-worker:{version('fedssl')}"
    if not _IMAGE.fullmatch(image):
        raise UsageError(
            f"--image {image}: this is not an image's name, such as registry.example.org/fedssl-worker:0.1.0"
        )
    return Kit(client, coordinator, image, b"" if ca is None else _certificates(ca))


def write_kit(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read, or to standard output for `-`."""
    from fedssl.files import write_atomically

    if str(path) == "-":
        sys.stdout.buffer.write(content)
        sys.stdout.flush()
    else:
        write_atomically(path, content, mode=0o600)


def _certificates(path: Path) -> bytes:
    """Return the certificates in a file, or on standard input for `-`. Raises UsageError."""
    try:
        with nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb") as file:
            content = file.read(_MAX_CA_BYTES + 1)
        if len(content) > _MAX_CA_BYTES:
            raise UsageError(f"--ca {path} has more than {_MAX_CA_BYTES} bytes: give only the authority's certificate")
        if not content.strip():
            raise UsageError(f"--ca {path} cannot be used (it is empty): give a certificate in PEM")
        ssl.create_default_context(cadata=content.decode("ascii"))
    except (OSError, UnicodeDecodeError) as error:  # ssl.SSLError is an OSError
        reason = getattr(error, "strerror", None) or "not a text file"
        raise UsageError(f"--ca {path} cannot be used ({reason}): give a certificate in PEM") from None
    if b"PRIVATE KEY" in content:
        raise UsageError(f"--ca {path} contains a private key, which must not be sent: give only the certificate")
    return content


def _entry(name: str, mode: int) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, datetime.now().timetuple()[:6])
    entry.create_system, entry.external_attr, entry.compress_type = 3, mode << 16, zipfile.ZIP_DEFLATED  # 3: Unix
    return entry
