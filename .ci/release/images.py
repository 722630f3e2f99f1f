"""The images, as archives in the OCI layout, and what they contain."""

import json
import re
import shlex
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from commands import run
from errors import ReleaseError

_SBOM = "opt/fedssl/sbom.cdx.json"
_PLATFORMS = ("linux/amd64", "linux/arm64")
_COORDINATOR, _WORKER = "services/coordinator/Dockerfile", "services/worker/Dockerfile"


class Image(NamedTuple):
    """An image, and the files that it is built from. `suffix` distinguishes its tag."""

    name: str
    dockerfile: str
    target: str
    torch: str | None = None
    suffix: str = ""
    platforms: tuple[str, ...] = _PLATFORMS

    def reference(self, version: str) -> str:
        """Return name and tag, without a registry."""
        return f"{self.name}:{version}{self.suffix}"


IMAGES = {
    "api": Image("fedssl-api", _COORDINATOR, "api"),
    "cli": Image("fedssl-cli", _COORDINATOR, "cli"),
    "aggregator": Image("fedssl-aggregator", _COORDINATOR, "aggregator", "cpu"),
    "worker": Image("fedssl-worker", _WORKER, "worker", "cpu"),
    # CUDA for the machines that have data centre GPUs.
    "aggregator-cuda": Image("fedssl-aggregator", _COORDINATOR, "aggregator", "cuda", "-cuda", _PLATFORMS[:1]),
    "worker-cuda": Image("fedssl-worker", _WORKER, "worker", "cuda", "-cuda", _PLATFORMS[:1]),
}


class Builder(NamedTuple):
    """A builder of Docker: its driver and the platforms that it can build for, beginning with its own."""

    driver: str
    platforms: tuple[str, ...]


def find_builder(wanted: tuple[str, ...]) -> Builder:
    """Return the selected builder, limited to the wanted platforms, or else to those that a release has.

    Raises ReleaseError if there is none, or if it cannot build what is wanted.
    """
    text = run("docker", "buildx", "inspect", "--bootstrap")
    driver = re.search(r"^Driver: +(\S+)", text, re.MULTILINE)
    platforms = re.search(r"^Platforms: +(.+)", text, re.MULTILINE)
    if driver is None or platforms is None:
        raise ReleaseError(f"`docker buildx inspect` names no driver or no platforms:\n{text}")
    can = tuple(dict.fromkeys(word.strip(" *") for word in platforms[1].split(",")))
    if driver[1] == "docker":  # it cannot export several platforms at once
        can = can[:1]
    hint = (
        "Create a builder for several: `docker buildx create --use --driver docker-container`, with QEMU's emulators "
        "(binfmt) for platforms of other machines"
    )
    if missing := set(wanted) - set(can):
        raise ReleaseError(
            f"the builder cannot build for {', '.join(sorted(missing))}, only for {', '.join(can)}. {hint}"
        )
    chosen = wanted or tuple(platform for platform in _PLATFORMS if platform in can)
    if not chosen:
        raise ReleaseError(
            f"the builder can build for none of {', '.join(_PLATFORMS)}, only for {', '.join(can)}. {hint}"
        )
    for platform in set(_PLATFORMS) - set(chosen):
        print(f"The images are not built for {platform}. {hint}.", file=sys.stderr)
    return Builder(driver[1], chosen)


def base_image(tree: Path, wanted: str) -> str:
    """Return the reference of the base image, with its digest: the wanted one, or else that of the Dockerfiles.

    A tag without a digest gets the digest that its registry has now, so that all images of a release have one base.
    Raises ReleaseError if the registry does not answer.
    """
    reference = wanted or str(re.findall(r"^ARG PYTHON=(\S+)$", (tree / _COORDINATOR).read_text(), re.MULTILINE)[0])
    if "@" in reference:
        return reference
    # buildx ignores a format that begins with {{.Manifest, and prints its own text.
    try:
        found = run(
            "docker", "buildx", "imagetools", "inspect", reference, "--format", "{{print .Manifest.Digest}}"
        ).strip()
    except ReleaseError as error:
        raise ReleaseError(
            f"the digest of the base image {reference} is not known: {error}\nWithout its registry, set BASE_IMAGE to "
            "a reference with a digest: BASE_IMAGE=python@sha256:..."
        ) from None
    if not re.fullmatch("sha256:[0-9a-f]{64}", found):
        raise ReleaseError(f"docker buildx imagetools inspect {reference} printed {found!r}, which is not a digest")
    return f"{reference}@{found}"


def build(image: Image, tree: Path, version: str, builder: Builder, base: str, options: str, archive: Path) -> None:
    """Build an image on this base for all platforms of the builder that it is meant for, into an archive."""
    platforms = [platform for platform in builder.platforms if platform in image.platforms]
    if not platforms:
        print(f"{image.reference(version)} is not built: it is only for {', '.join(image.platforms)}.", file=sys.stderr)
        return
    command = ["docker", "buildx", "build", "--file", image.dockerfile, "--target", image.target]
    command += ["--platform", ",".join(platforms), "--tag", image.reference(version)]
    command += ["--build-arg", f"PYTHON={base}", *shlex.split(options)]
    command += ["--build-arg", f"TORCH={image.torch}"] if image.torch else []
    if builder.driver == "docker":
        run(*command, ".", cwd=tree)
        run("docker", "save", "--output", archive, image.reference(version))
    else:
        run(*command, "--provenance=false", "--output", f"type=oci,dest={archive}", ".", cwd=tree)
    archive.chmod(0o644)


def digest(archive: Path) -> str:
    """Return the digest by which a registry knows the image of this archive."""
    with tarfile.open(archive) as packed:
        [manifest] = _json(packed, "index.json")["manifests"]
    return str(manifest["digest"])


def bills_of_materials(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the platform and the bill of materials of each image in the archive, read from the image's own files."""
    with tarfile.open(archive) as packed:
        for manifest in _manifests(packed, _json(packed, "index.json")):
            config = _json(packed, _blob(manifest["config"]))
            yield f"{config['os']}-{config['architecture']}", _read_file(packed, manifest["layers"], archive)


def _manifests(packed: tarfile.TarFile, index: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for entry in index["manifests"]:
        found = _json(packed, _blob(entry))
        if "manifests" in found:
            yield from _manifests(packed, found)
        else:
            yield found


def _read_file(packed: tarfile.TarFile, layers: list[dict[str, Any]], archive: Path) -> bytes:
    for layer in reversed(layers):  # one of the last, which are small
        stream = packed.extractfile(_blob(layer))
        with tarfile.open(fileobj=stream) as files:
            if _SBOM in files.getnames():
                content = files.extractfile(_SBOM)
                assert content is not None
                return bytes(content.read())
    raise ReleaseError(f"{archive.name} contains no /{_SBOM}")


def _blob(descriptor: dict[str, Any]) -> str:
    return f"blobs/{descriptor['digest'].replace(':', '/')}"


def _json(packed: tarfile.TarFile, name: str) -> Any:
    stream = packed.extractfile(name)
    assert stream is not None, name
    return json.load(stream)
