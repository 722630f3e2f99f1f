"""Reads a partition from a JSON file with the indices of each client's images. Errors name the file and the client."""

import json
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from fedssl.errors import DataError
from fedssl.protocol.base import ClientId
from fedssl.wording import plural

MAX_PARTITION_FILE_BYTES = 1 << 27
"""Enough for about nine million images with one index per indented line."""

_client_id: TypeAdapter[str] = TypeAdapter(ClientId)


def read_partition(path: Path, names: Sequence[str], num_images: int) -> dict[str, NDArray[np.int64]]:
    """Read which images each client gets.

    Args:
        path: a JSON file: a list with a list of indices per client (as SSD's authors publish theirs), or an object that
            maps the clients' names to such lists. Indices count the images of the training split from 0, in the order
            of the data set. An image may belong to no client.
        names: the K clients' names if the file has none.
        num_images: N, the number of images of the training split.

    Returns:
        For each of the K clients, in the order of the file, its sorted indices.

    Raises:
        DataError: the file cannot be read, has another number of clients, or a client has no images, an index that is
            not a whole number from 0 to N - 1, or an image that it or another client has already.
    """
    clients = _named(path, _read_json(path), names)
    owners: NDArray[np.int64] = np.full(num_images, -1, np.int64)
    found: dict[str, NDArray[np.int64]] = {}
    for number, (name, indices) in enumerate(clients.items()):
        found[name] = part = _indices(f"{path}: {name}", indices, num_images)
        taken = part[owners[part] >= 0]
        if len(taken):
            other = list(clients)[owners[taken[0]]]
            raise DataError(f"{path}: image {taken[0]} belongs to both {other} and {name}: give it to one client")
        owners[part] = number
    return found


def _read_json(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_PARTITION_FILE_BYTES + 1)
    except OSError as error:
        raise DataError(f"cannot read the partition's file {path}: {error.strerror or error}") from None
    if len(content) > MAX_PARTITION_FILE_BYTES:
        raise DataError(f"{path} is larger than {MAX_PARTITION_FILE_BYTES >> 20} MiB, the limit for a partition's file")
    try:
        return json.loads(content, object_pairs_hook=lambda pairs: _object(path, pairs))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON: {error}") from None


def _object(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Python's reader would silently keep only the last of two equal keys."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise DataError(f"{path} has the client {reprlib.repr(name)} twice: name each client once")
        found[name] = value
    return found


def _named(path: Path, content: Any, names: Sequence[str]) -> dict[str, Any]:
    if not isinstance(content, list | dict):
        raise DataError(
            f"{path} must hold a list of indices per client, or an object from clients to such lists, and holds "
            f"{reprlib.repr(content)}"
        )
    if len(content) != len(names):
        raise DataError(
            f"{path} has {plural(len(content), 'client')}, but partition.num_clients is {len(names):,}: set it to the "
            "number of clients of the file"
        )
    if isinstance(content, list):
        return dict(zip(names, content, strict=True))
    for name in content:
        try:
            _client_id.validate_python(name)
        except ValidationError:
            _refuse_name(path, name)
    return content


def _refuse_name(path: Path, name: str) -> NoReturn:
    raise DataError(
        f"{path}: {reprlib.repr(name)} cannot be a client's name, which has at most 63 lower-case letters, digits and "
        "hyphens"
    )


def _indices(place: str, indices: Any, num_images: int) -> NDArray[np.int64]:
    if not isinstance(indices, list):
        raise DataError(f"{place} must have a list of indices, and has {reprlib.repr(indices)}")
    if not indices:
        raise DataError(f"{place} has no images: give it some, or leave the client out")
    for index in indices:
        if type(index) is not int:  # a bool is an int, too
            raise DataError(f"{place} has the index {reprlib.repr(index)}, which is not a whole number")
        if not 0 <= index < num_images:
            raise DataError(
                f"{place} has the index {reprlib.repr(index)}, but the training split has the images 0 to "
                f"{num_images - 1}"
            )
    part = np.sort(np.array(indices, np.int64))
    twice = part[1:][np.diff(part) == 0]
    if len(twice):
        raise DataError(f"{place} has image {twice[0]} twice: list each image once")
    return part
