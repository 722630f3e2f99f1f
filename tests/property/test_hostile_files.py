"""Hostile files on every path: an upload in one request, a resumed upload, and a data owner's own folder.

An upload is refused with a problem and changes nothing, and both kinds of upload give the same verdict. A folder of
images or an array file is read, or refused with a DataError, in bounded time and memory. `make fuzz` draws more
files.
"""

import functools
import io
import json
import random
import resource
import struct
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import nibabel
import numpy as np
import pytest
import torch
from PIL import Image

from fedssl.artifacts.tensors import serialised
from fedssl.errors import DataError
from fedssl_worker.data import OwnImages
from support.coordinator import Coordinator
from support.data_sets import labelled_bytes, public_bytes
from support.dicom_files import write_compressed, write_dicom
from support.federation import tensors_for
from support.fuzzing import examples
from support.scenario import Scenario
from support.servers import Servers
from support.tables import ChangeWatcher, Tables
from support.tus import Tus
from support.uploads import build_file, digest, split_file

DRAWN = range(examples(2))
MAX_SECONDS = 20  # for one file, on a busy machine
MAX_GROWTH_KB = 1 << 20  # of this process's memory, over all hostile images

Change = Callable[[dict[str, Any], bytes, random.Random], bytes]


# --- Safetensors ----------------------------------------------------------------------------------------------------


def _some(header: dict[str, Any], drawn: random.Random) -> dict[str, Any]:
    entry = header[drawn.choice(sorted(header))]
    assert isinstance(entry, dict)
    return entry


def _with_entry(key: str, values: Callable[[dict[str, Any], random.Random], Any]) -> Change:
    def change(header: dict[str, Any], body: bytes, drawn: random.Random) -> bytes:
        entry = _some(header, drawn)
        entry[key] = values(entry, drawn)
        return build_file(header, body)

    return change


def _moved(by: int) -> Change:
    return _with_entry("data_offsets", lambda entry, drawn: [offset + by for offset in entry["data_offsets"]])


def _text(change: Callable[[str, random.Random], str]) -> Change:
    return lambda header, body, drawn: build_file(change(json.dumps(header, separators=(",", ":")), drawn), body)


def _deep(opening: str, closing: str) -> Change:
    def change(header: dict[str, Any], body: bytes, drawn: random.Random) -> bytes:
        depth = drawn.choice([10, 500, 3000])
        return build_file(
            '{"a":{"dtype":"F32","data_offsets":[0,4],"shape":' + opening * depth + "1" + closing * depth + "}}", body
        )

    return change


def _flipped(header: dict[str, Any], body: bytes, drawn: random.Random) -> bytes:
    """Flip one bit of the header or of its length."""
    file = bytearray(build_file(header, body))
    file[drawn.randrange(len(file) - len(body))] ^= 1 << drawn.randrange(8)
    return bytes(file)


def _payload(dtype: str, patterns: list[int]) -> Change:
    """Return a change that writes one of the bit patterns over a number. NaN, for example, has millions of them."""

    def change(header: dict[str, Any], body: bytes, drawn: random.Random) -> bytes:
        spoilt = bytearray(body)
        entry = drawn.choice(
            [e for e in header.values() if e["dtype"] == dtype and e["data_offsets"][1] > e["data_offsets"][0]]
        )
        at = drawn.randrange(entry["data_offsets"][0], entry["data_offsets"][1], 4)
        spoilt[at : at + 4] = struct.pack("<I", drawn.choice(patterns))
        return build_file(header, bytes(spoilt))

    return change


HEADERS: dict[str, Change] = {
    "a flipped bit": _flipped,
    "a length that lies": lambda h, b, d: build_file(h, b, length=d.choice([0, 7, 2**20, 2**40, 2**63, 2**64 - 1])),
    "overlapping tensors": _moved(-4),
    "a gap": _moved(8),
    "negative places": _moved(-(2**40)),
    "places beyond the end": _moved(2**40),
    "odd numbers": _with_entry("data_offsets", lambda e, d: [d.choice([True, None, 0.5, 1e308, "0", 2**64, -1]), 4]),
    "another type": _with_entry("dtype", lambda e, d: d.choice(["F64", "F16", "BF16", "BOOL", "f32", "", None, 7])),
    "a shape that overflows": _with_entry(
        "shape", lambda e, d: d.choice([[2**62, 8], [2**32, 2**32], [-1, -4], [0], [1] * 5000])
    ),
    "a name twice": _text(lambda text, drawn: text[:-1] + "," + text[1:]),
    "a key twice": _text(lambda text, drawn: text.replace('"dtype":', '"dtype":"I8","dtype":', 1)),
    "a huge header": _text(lambda text, drawn: text + " " * drawn.choice([10_000, 300_000, 5_000_000])),
    "many names": _text(lambda text, drawn: json.dumps({f"n{i}": 0 for i in range(20_000)})),
    "metadata": _text(lambda text, drawn: '{"__metadata__":{"a":"' + "x" * drawn.randrange(99) + '"},' + text[1:]),
    "NaN in JSON": _text(lambda text, drawn: text.replace("[", drawn.choice(["[NaN,", "[Infinity,", "[1e999,"]), 1)),
    "invalid UTF-8": lambda h, b, d: build_file(b'{"\xff\xfe":' + json.dumps(h).encode()[1:], b),
    "deep lists": _deep("[", "]"),
    "deep objects": _deep('{"a":', "}"),
    "cut short": lambda h, b, d: build_file(h, b)[: d.randrange(len(build_file(h, b)))],
    "longer": lambda h, b, d: build_file(h, b + bytes(d.randrange(1, 9999))),
    "another format": lambda h, b, d: d.choice(
        [zlib.compress(bytes(9999)), b"\x80\x04\x95" + bytes(99), b"PK\x03\x04" + bytes(99)]
    ),
}  # fmt: skip
UPDATES: dict[str, Change] = {
    **HEADERS,
    "a NaN that spells something": _payload("F32", [0x7FC0BEEF, 0xFF80DEAD, 0x7F800001]),
    "infinity": _payload("F32", [0x7F800000, 0xFF800000]),
}


@dataclass(frozen=True)
class Uploader:
    """A worker's lease, an admin and an operator, each with the file to upload."""

    coordinator: Coordinator
    change_watcher: ChangeWatcher
    assignment: str
    secrets: dict[str, str]
    files: dict[str, bytes]

    def put(self, who: str, content: bytes) -> httpx.Response:
        """Upload the content in one request, and return the answer."""
        params = {"assignment": self.assignment} if who == "worker" else {}
        with self.coordinator.http(self.secrets[who]) as http:
            return http.put(f"/v1/artifacts/{digest(content)}", params=params, content=content)

    def resumed(self, who: str, content: bytes, drawn: random.Random) -> httpx.Response:
        """Upload the content in parts, with the whole header in the first one. Return the last answer."""
        with Tus(self.coordinator, self.secrets[who]) as tus:
            assignment = self.assignment if who == "worker" else None
            answer = tus.announce(max(len(content), 1), digest(content), assignment)
            if answer.status_code != 201:
                return answer
            location, offset = answer.headers["location"], 0
            end = min(len(content), 8 + int.from_bytes(content[:8], "little"))
            while offset < len(content) or offset == 0:
                stop = max(end, offset + drawn.randrange(1, len(content) + 2))
                answer = tus.send(location, content[offset:stop], offset)
                if answer.status_code != 204 or stop >= len(content):
                    return answer
                offset = stop
            return answer


@pytest.fixture(scope="module")
def uploader(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Uploader]:
    folder = tmp_path_factory.mktemp("hostile")
    with (
        servers.database() as url,
        Coordinator(url, servers.redis_url, folder / "store", FEDSSL_CLAIM_WAIT_SECONDS="0") as running,
        Tables(url) as tables,
    ):
        scenario = Scenario(running, tables, folder, "a")
        item = scenario.claim("a")
        secrets = {
            "worker": running.worker_token("a"),
            "public": running.admin_token,
            "labelled": running.operator_token,
        }
        update = serialised(tensors_for(item.plan.update, 0.5))
        files = {"worker": update, "public": public_bytes(), "labelled": labelled_bytes()}
        yield Uploader(running, ChangeWatcher(tables, running.store), str(item.assignment_id), secrets, files)


CASES = [(who, case) for who in ("worker", "public", "labelled") for case in (UPDATES if who == "worker" else HEADERS)]


@pytest.mark.parametrize(("who", "case"), CASES, ids=[f"{who}: {case}" for who, case in CASES])
def test_hostile_files_are_refused_by_both_kinds_of_upload(uploader: Uploader, who: str, case: str) -> None:
    with uploader.change_watcher.nothing_changes():
        for seed in DRAWN:
            drawn = random.Random(seed)
            content = UPDATES[case](*split_file(uploader.files[who]), drawn)
            answers = uploader.put(who, content), uploader.resumed(who, content, drawn)
            for answer in answers:
                assert answer.status_code in (413, 422), (seed, answer.status_code, answer.text)
                assert answer.headers["content-type"] == "application/problem+json"
                assert len(answer.content) < 3000
            if len(content) > 8:
                assert answers[0].json()["type"] == answers[1].json()["type"], (seed, [a.text for a in answers])


def test_correct_files_are_accepted_by_both_kinds_of_upload_afterwards(uploader: Uploader) -> None:
    for who, content in uploader.files.items():
        assert uploader.resumed(who, content, random.Random(0)).status_code == 204
        assert uploader.put(who, content).status_code == 200
    assert uploader.coordinator.client.ready().status == "ok"


# --- Images ---------------------------------------------------------------------------------------------------------


def _picture(kind: str, size: int = 24) -> bytes:
    pixels = np.random.default_rng(size).integers(0, 256, (size, size, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def _png(width: int, height: int, *chunks: bytes, rows: bytes = b"") -> bytes:
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + _chunk(b"IDAT", zlib.compress(rows, 9)) + _chunk(b"IEND", b"")
    )


def _zip(*members: tuple[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return out.getvalue()


def _npy(header: str, body: bytes = b"") -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + body


@functools.cache
def _bomb() -> bytes:
    return zlib.compress(bytes(200_000_000), 9)


PICTURES: dict[str, bytes | Callable[[], bytes]] = {
    "a PNG of 2.5 gigapixels": _png(50_000, 50_000),
    "a PNG wider than 32 bits": _png(2**31 - 1, 2**31 - 1),
    "a PNG without pixels": _png(0, 0),
    "a PNG whose rows are a bomb": lambda: _png(24, 24)[:-12] + _chunk(b"IDAT", _bomb()) + _chunk(b"IEND", b""),
    "a PNG whose text is a bomb": lambda: _png(24, 24, _chunk(b"zTXt", b"k\0\0" + _bomb()), rows=bytes(25 * 24)),
    "a PNG whose profile is a bomb": lambda: _png(24, 24, _chunk(b"iCCP", b"k\0\0" + _bomb()), rows=bytes(25 * 24)),
    "a PNG cut short": _picture("PNG")[:-40],
    "a chunk longer than the file": _picture("PNG")[:33] + b"\xff\xff\xff\xffIDAT" + bytes(50),
    "a JPEG cut short": _picture("JPEG")[:200],
    "a JPEG of 65,500 pixels a side": _picture("JPEG").replace(
        b"\xff\xc0\x00\x11\x08\x00\x18\x00\x18", b"\xff\xc0\x00\x11\x08\xff\xdc\xff\xdc"
    ),
    "a GIF": _picture("GIF"),
    "a TIFF cut short": _picture("TIFF")[:-600],
    "a TIFF of 2**31 pixels a side": _picture("TIFF")
    .replace(struct.pack("<HHII", 256, 4, 1, 24), struct.pack("<HHII", 256, 4, 1, 2**31))
    .replace(struct.pack("<HHII", 257, 4, 1, 24), struct.pack("<HHII", 257, 4, 1, 2**31)),
    "a zip": _zip(("x.png", _picture("PNG"))),
    "nothing": b"",
    "one byte": b"\x89",
    "a page": b"<svg onload=alert(1)></svg>",
}
ARRAYS: dict[str, bytes | Callable[[], bytes]] = {
    "an array that claims an exabyte": _zip(
        ("images.npy", _npy("{'descr': '|u1', 'fortran_order': False, 'shape': (1152921504606846976,)}"))
    ),
    "an array whose size overflows": _zip(
        ("images.npy", _npy("{'descr': '|u1', 'fortran_order': False, 'shape': (4294967296, 4294967296)}"))
    ),
    "pickled objects": _zip(
        ("images.npy", _npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", b"\x80\x04cos\nsystem\n."))
    ),
    "a header that is code": _zip(("images.npy", _npy("__import__('os').abort()"))),
    "a header without an end": _zip(("images.npy", _npy("(" * 5000))),
    "a deep header": _zip(("images.npy", _npy("(" * 4000 + ")" * 4000))),
    "a header of wrong indents": _zip(("images.npy", _npy("{\n 1:\n   2,\n  3"))),
    "a header that is no text": _zip(("images.npy", _npy("\0'\\N{x}'"))),
    "a bomb": lambda: _zip(
        ("images.npy", _npy("{'descr': '|u1', 'fortran_order': False, 'shape': (4,)}", bytes(200_000_000)))
    ),
    "floats that are not numbers": _zip(
        ("images.npy", _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 8, 8)}", b"\xff" * 256))
    ),
    "nothing": b"",
    "no archive": b"PK\x03\x04" + bytes(50),
}  # fmt: skip


def _content(case: bytes | Callable[[], bytes]) -> bytes:
    """Return a case's bytes, which are made on demand: a bomb takes a second, also in processes that only collect
    tests."""
    return case() if callable(case) else case


def _read(path: Path) -> str:
    """Read a data owner's images. Return the reason if they are refused, or an empty text."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    try:
        images = OwnImages(str(path), torch.device("cpu"), image_size=8)
    except DataError as error:
        refusal = str(error)
        assert refusal
        assert len(refusal) < 2000
    else:
        refusal = ""
        assert images.data.images.dtype in (torch.uint8, torch.int16)  # a changed header may declare more than 8 bits
        assert images.data.images.shape[2:] == (8, 8)
    assert time.monotonic() - started < MAX_SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_GROWTH_KB
    return refusal


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("case", PICTURES)
def test_hostile_pictures_in_a_folder_are_refused(tmp_path: Path, case: str) -> None:
    folder = tmp_path / "images" / "class"
    folder.mkdir(parents=True)
    (folder / "a.png").write_bytes(_picture("PNG"))
    assert _read(folder.parent) == ""
    for name in ("b.png", "b.jpg"):
        (folder / name).write_bytes(_content(PICTURES[case]))
        assert name in _read(folder.parent)
        (folder / name).unlink()


@pytest.mark.parametrize("case", ARRAYS)
def test_hostile_arrays_are_refused(tmp_path: Path, case: str) -> None:
    (tmp_path / "images.npz").write_bytes(_content(ARRAYS[case]))
    assert str(tmp_path / "images.npz") in _read(tmp_path / "images.npz")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "WEBP", "npz", "DCM", "DICOM", "NII"])
def test_changed_bytes_are_read_or_refused(tmp_path: Path, kind: str) -> None:
    """Bits are flipped, and parts removed or doubled, anywhere in a correct file."""
    out = io.BytesIO()
    np.savez(out, train_images=np.zeros((4, 1, 8, 8), np.uint8), train_labels=np.arange(4))
    if kind == "npz":
        content = out.getvalue()
    elif kind == "DCM":
        content = write_dicom(tmp_path / "right", np.zeros((8, 8), np.uint8)).read_bytes()
    elif kind == "DICOM":
        frames = list(np.random.default_rng(0).integers(0, 256, (2, 8, 8), np.uint8))
        content = write_compressed(tmp_path / "right", frames, "JPEG2000").read_bytes()
    elif kind == "NII":
        nibabel.Nifti1Image(np.zeros((8, 8, 2), np.uint8), np.eye(4)).to_filename(tmp_path / "right.nii")
        content = (tmp_path / "right.nii").read_bytes()
    else:
        content = _picture(kind)
    path = tmp_path / "images" / f"a.{kind.lower()}" if kind.isupper() else tmp_path / f"images.{kind}"
    path.parent.mkdir(exist_ok=True)
    for seed in range(examples(10)):
        drawn = random.Random(seed)
        file = bytearray(content)
        for _ in range(drawn.randrange(1, 5)):
            at = drawn.randrange(len(file))
            match drawn.randrange(3):
                case 0:
                    file[at] ^= 1 << drawn.randrange(8)
                case 1:
                    del file[at : at + drawn.randrange(1, 40)]
                case _:
                    file[at:at] = file[at : at + drawn.randrange(1, 40)]
            if not file:
                break
        path.write_bytes(file)
        _read(path.parent if kind.isupper() else path)
