"""Files of many images (`.npz` arrays, tar shards and Parquet) give the same bits as the images in single files."""

import io
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedssl.data import format_packages, load_conformed, packed
from fedssl.data.contents import read_contents
from fedssl.data.formats import read_npz
from fedssl.data.image_cache import load_cached
from fedssl.data.image_cache.decoders import num_decoders
from fedssl.errors import DataError
from fedssl.protocol.data import DataConfig

_DATA = DataConfig(channels=3, image_size=16)


def _pixels(number: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(number).integers(0, 256, (20, 24, 3), np.uint8)


def _png(number: int) -> bytes:
    Image.fromarray(_pixels(number)).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def _write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with nine images in three files. `plain` next to it has the same images in single files."""
    folder, plain = tmp_path / "packed", tmp_path / "plain"
    for each in (folder / "a", folder / "b", plain / "a", plain / "b"):
        each.mkdir(parents=True)
    np.savez(folder / "a" / "0.npz", images=np.stack([_pixels(number) for number in range(3)]), labels=[7, 7, 7])
    _write_tar(
        folder / "a" / "1.tar",
        {"x/3.png": _png(3), "x/3.cls": b"5", "x/._4.png": b"0", "x/4.png": _png(4), "x/4.json": b"{}"},
    )
    cells = [{"bytes": _png(number), "path": None} for number in range(5, 9)]
    pq.write_table(pa.table({"image": cells, "label": [0, 1, 0, 1]}), folder / "b" / "2.parquet", row_group_size=3)
    for number in range(9):
        (plain / "ab"[number > 4] / f"{number}.png").write_bytes(_png(number))
    return folder


def test_packed_images_have_the_same_bits_as_single_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, plain = (load_conformed(str(each), "train", _DATA) for each in (folder, tmp_path / "plain"))
    assert found.labels is not None
    assert found.labels.tolist() == [0] * 5 + [1] * 4
    # Arrays are scaled without an intermediate rounding to 8 bits.
    assert np.abs(found.images[:3].astype(int) - plain.images[:3]).max() <= 1
    assert np.array_equal(found.images[3:], plain.images[3:])
    data = _DATA.model_copy(update={"cache_size": 20})
    caches = []
    for processes in (1, 4):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(processes)))
        caches.append(load_cached(str(folder), data, processes=processes))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "files"))
    files = load_cached(str(tmp_path / "plain"), data).images.squares(np.arange(9))
    one, four = (cache.images.squares(np.arange(9)) for cache in caches)
    assert one.equal(four)
    assert one.equal(files), "at 20 pixels nothing is scaled in width or height"
    assert caches[0].digests[0].endswith("#1")


def test_a_damaged_image_is_left_out_up_to_the_permitted_share(folder: Path) -> None:
    _write_tar(folder / "a" / "1.tar", {"3.png": _png(3)[:50], "4.png": _png(4)})
    tolerant = _DATA.model_copy(update={"max_unreadable": 0.2})
    assert load_conformed(str(folder), "train", tolerant, leave_out=True).unreadable == (3,)
    with pytest.raises(DataError, match=r"1\.tar#1"):
        load_conformed(str(folder), "train", _DATA)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("1.tar", b"", "empty"),
        ("1.tar", b"x" * 2000, "header|truncated"),
        ("0.npz", b"", "not a zip file"),
        ("0.npz", b"PK" + b"x" * 100, "zip|pickle"),
        ("2.parquet", b"", "size|0 bytes"),
        ("2.parquet", b"PAR1" + b"x" * 100, "magic|corrupt"),
    ],
)
def test_damaged_files_are_refused_with_the_reason(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"cannot read .*{name}: .*({reason}).*repair the file"):
        load_conformed(str(tmp_path), "train", _DATA)


def test_truncated_shards_and_files_without_images_are_refused(folder: Path, tmp_path: Path) -> None:
    shard = folder / "a" / "1.tar"
    shard.write_bytes(shard.read_bytes()[:1800])
    with pytest.raises(DataError, match=r"1\.tar: .*(truncated|unexpected end)"):
        load_conformed(str(folder), "train", _DATA)
    other = tmp_path / "other"
    other.mkdir()
    pq.write_table(pa.table({"image": ["a.png"]}), other / "names.parquet")
    with pytest.raises(DataError, match="its column image holds string, and only the bytes"):
        load_conformed(str(other), "train", _DATA)
    pq.write_table(pa.table({"text": ["a"]}), other / "names.parquet")
    with pytest.raises(DataError, match="it has no column of images"):
        load_conformed(str(other), "train", _DATA)
    (other / "names.parquet").unlink()
    np.savez(other / "x.npz", images=np.zeros((2, 8, 8), np.uint8), window=np.array("{}"))
    with pytest.raises(DataError, match="through a window: give the file by its own path"):
        load_conformed(str(other), "train", _DATA)
    (other / "x.npz").unlink()
    _write_tar(other / "x.tar", {"readme.txt": b"no image"})
    with pytest.raises(DataError, match=r"holds no images.*1 \.tar \(no images in it"):
        load_conformed(str(other), "train", _DATA)


def test_a_shard_with_a_damaged_header_or_without_its_end_mark_is_refused(tmp_path: Path) -> None:
    """It is unknown whether images are missing. tarfile stops there without an error."""
    shard = tmp_path / "1.tar"
    _write_tar(shard, {f"{number}.{kind}": b"5" for number in range(3) for kind in ("cls", "png")})
    whole = shard.read_bytes()
    assert len(read_contents(tmp_path).loose) == 3
    damaged, hole = bytearray(whole), bytearray(whole)
    damaged[4 * 512 + 150] ^= 4  # in the checksum of the third file
    hole[4 * 512 : 8 * 512] = bytes(4 * 512)
    for content in (damaged, hole, whole + whole, whole[: 4 * 512], whole[: 4 * 512 + 100]):
        shard.write_bytes(content)
        with pytest.raises(DataError, match=r"1\.tar: .*(its end is not marked|more after its marked end)"):
            read_contents(tmp_path)


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE], ids=["hard link", "symbolic link"])
def test_a_link_in_place_of_an_image_is_refused(tmp_path: Path, kind: bytes) -> None:
    """Otherwise its image would be missing silently. GNU tar writes a hard link if it meets a file a second time."""
    with tarfile.open(tmp_path / "1.tar", "w") as archive:
        link = tarfile.TarInfo("b.png")
        link.type, link.linkname = kind, "a.png"
        archive.addfile(link)
    with pytest.raises(DataError, match=r"1\.tar: .*b\.png in it is a link"):
        read_contents(tmp_path)


def test_an_image_that_occurs_twice_in_a_shard_is_refused(tmp_path: Path) -> None:
    """`tar -r` and `tar -u` append a second file of the name. Both would count, but unpacking keeps only the last."""
    with tarfile.open(tmp_path / "1.tar", "w") as archive:
        for _ in range(2):
            archive.addfile(tarfile.TarInfo("a.png"))
    with pytest.raises(DataError, match=r"1\.tar: a\.png is in it twice"):
        read_contents(tmp_path)


@pytest.mark.parametrize("names", [("images.npy", "images.npy"), ("images", "images.npy")], ids=["equal", "suffix"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_array_that_occurs_twice_in_a_file_is_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    """numpy silently reads one of the two."""
    array = io.BytesIO()
    np.save(array, np.zeros((2, 8, 8), np.uint8))
    with zipfile.ZipFile(tmp_path / "1.npz", "w") as archive:
        for name in names:
            archive.writestr(name, array.getvalue())
    with pytest.raises(DataError, match=r"1\.npz: it has two arrays images"):
        read_contents(tmp_path)
    with pytest.raises(DataError, match=r"1\.npz: it has two arrays images"):
        read_npz(tmp_path / "1.npz", "train")


@pytest.mark.parametrize("shape", [f"({10**30}, 8, 8)", "(True, 8, 8)"])
def test_a_numpy_header_with_impossible_sizes_is_an_error_that_names_the_file(tmp_path: Path, shape: str) -> None:
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    with zipfile.ZipFile(tmp_path / "1.npz", "w") as archive:
        archive.writestr("images.npy", b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + bytes(64))
    with pytest.raises(DataError, match=r"cannot read .*1\.npz"):
        read_contents(tmp_path)
    with pytest.raises(DataError, match=r"cannot read .*1\.npz"):
        read_npz(tmp_path / "1.npz", "train")


def test_a_sparse_member_in_place_of_an_image_is_refused(tmp_path: Path) -> None:
    """The bytes after its header are not those of the file, so other pixels would be read."""
    with tarfile.open(tmp_path / "1.tar", "w") as archive:
        member = tarfile.TarInfo("a.bmp")
        member.type = tarfile.GNUTYPE_SPARSE
        archive.addfile(member)
    with pytest.raises(DataError, match=r"1\.tar: a\.bmp in it is stored without its zeros: .*--sparse"):
        read_contents(tmp_path)


def test_a_row_group_is_limited_by_its_expanded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file stores a repeated image once, and declares that size."""
    pq.write_table(pa.table({"image": [_png(0)] * 100}), tmp_path / "1.parquet")
    monkeypatch.setattr(packed, "MAX_MEMBER_BYTES", 10 * len(_png(0)))
    with pytest.raises(DataError, match=r"a group of rows has [0-9,]+ bytes or more; at most"):
        load_conformed(str(tmp_path), "train", _DATA)


def test_row_groups_with_more_rows_than_their_file_are_refused(tmp_path: Path) -> None:
    """A damaged footer could otherwise declare any number of images, and each would get a name."""
    pq.write_table(pa.table({"image": [b""] * 20_000}), path := tmp_path / "1.parquet")
    content = path.read_bytes()
    size = int.from_bytes(content[-8:-4], "little")
    body, footer = content[: -8 - size], content[-8 - size : -8]
    rows = bytes((0xC0, 0xB8, 0x02))  # 20,000, encoded by Thrift
    start = footer.rindex(rows)  # of the row group, after that of the file
    footer = footer[:start] + bytes((0x82, 0x89, 0x7A)) + footer[start + len(rows) :]
    path.write_bytes(body + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(DataError, match="it has 1,000,001 rows; at most 1,000,000 are read"):
        read_contents(tmp_path)


def test_listing_reads_only_the_headers_of_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as listing:
        listing.setattr(np, "load", lambda *_, **__: pytest.fail("the array was loaded"))
        for version in ((1, 0), (2, 0), (3, 0)):
            with zipfile.ZipFile(tmp_path / "1.npz", "w") as archive, archive.open("images.npy", "w") as file:
                np.lib.format.write_array(file, np.zeros((7, 8, 8), np.uint8), version)
            assert len(read_contents(tmp_path).loose) == 7
    np.savez(tmp_path / "1.npz", images=np.array([None, {}]))
    with pytest.raises(DataError, match=r"1\.npz: .*not an array of numbers"):
        read_contents(tmp_path)


def test_one_array_at_a_time_is_in_memory_and_it_is_freed_after_decoding(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedssl.data.image_cache.decoders.num_usable_cores", lambda: 4)
    assert [num_decoders([f"a.{kind}#1"] * 200) for kind in ("npz", "tar")] == [1, 3]
    load_conformed(str(folder), "train", _DATA)
    assert packed._arrays.cache_info().currsize == packed._group.cache_info().currsize == 0


def test_without_the_extra_parquet_is_left_out_and_the_install_command_is_given(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"image": [_png(1)]}), folder / "1.parquet")
    monkeypatch.setattr(format_packages, "is_installed", lambda package: False)
    left_out = [each for each in read_contents(folder).left_out if each.what == ".parquet"]
    assert [each.reason for each in left_out] == [
        "Parquet is not read without its packages: pip install 'fedssl[parquet]'"
    ]
