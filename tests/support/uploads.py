"""Malformed safetensors files, and requests that no client would send."""

import hashlib
import json
import socket
from collections.abc import Mapping
from typing import Any

from fedssl.artifacts.tensors import Tensors, serialised


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def split_file(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return a file's header and the bytes that follow it."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert isinstance(header, dict)
    return header, data[8 + length :]


def build_file(header: Mapping[str, Any] | str | bytes, body: bytes = b"", *, length: int | None = None) -> bytes:
    """Return a file with this header, valid or not; `length` is the number in its first eight bytes.

    A mapping is written as the library would write it.
    """
    if isinstance(header, Mapping):
        header = json.dumps(header, separators=(",", ":"))
        header += " " * (-len(header) % 8)
    text = header.encode() if isinstance(header, str) else header
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def safetensors_bytes(tensors: Tensors) -> bytes:
    return serialised(tensors)


def raw_request(url: str, head: str, body: bytes, *, then_close: bool) -> bytes:
    """Send a request unchanged and return the beginning of the answer, or close before it if `then_close`."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
        if then_close:
            return b""
        return connection.recv(65536)
