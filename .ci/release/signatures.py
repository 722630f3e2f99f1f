"""Checksums of a release's files, and their signature by a maintainer's SSH key (docs/releases.md, ADR 8)."""

import hashlib
import tempfile
from pathlib import Path

from commands import run
from errors import ReleaseError

CHECKSUMS, SIGNATURE = "SHA256SUMS", "SHA256SUMS.sig"
_NAMESPACE = _IDENTITY = "fedssl-release"


def write_checksums(folder: Path) -> None:
    """Write the SHA-256 of every file in the folder, in the format of `sha256sum`."""
    files = sorted(path for path in folder.iterdir() if path.name not in (CHECKSUMS, SIGNATURE))
    lines = []
    for path in files:
        with path.open("rb") as stream:
            lines.append(f"{hashlib.file_digest(stream, 'sha256').hexdigest()}  {path.name}\n")
    (folder / CHECKSUMS).write_text("".join(lines))


def sign(file: Path, key: Path) -> Path:
    """Sign a file with an SSH key; return the signature's file. ssh-keygen asks for a passphrase if the key has one."""
    run("ssh-keygen", "-q", "-Y", "sign", "-f", key, "-n", _NAMESPACE, file)
    return file.with_name(f"{file.name}.sig")


def verify(file: Path, signature: Path, signers: Path) -> None:
    """Raise ReleaseError unless a key in `signers` has signed this file."""
    arguments = ("-f", signers, "-I", _IDENTITY, "-n", _NAMESPACE, "-s", signature)
    run("ssh-keygen", "-Y", "verify", *arguments, text=file.read_text())


def check_key(key: Path, signers: Path) -> None:
    """Raise ReleaseError unless this key can sign and `signers` lists it, so that users can check its signatures."""
    if not key.is_file():
        raise ReleaseError(
            f"there is no file {key}: KEY is the path of your private SSH key, or of its public key if an agent holds "
            "the private one"
        )
    with tempfile.TemporaryDirectory() as folder:
        trial = Path(folder, "trial")
        trial.write_text("trial\n")
        signature = sign(trial, key)
        try:
            verify(trial, signature, signers)
        except ReleaseError:
            public = key if key.suffix == ".pub" else key.with_name(f"{key.name}.pub")
            shown = " ".join(public.read_text().split()[:2]) if public.is_file() else "ssh-ed25519 AAAA..."
            raise ReleaseError(
                f"the key {key} is not in .ci/release/allowed_signers, so no user could check its signature. Add this "
                f'line in a commit of its own:\n{_IDENTITY} namespaces="{_NAMESPACE}" {shown}'
            ) from None
