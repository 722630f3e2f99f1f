"""Labels in CSV files: their contents, and errors that name the file and the line."""

import numpy as np
import pytest
from PIL import Image

from fedssl.data.label_files import OWN, load_site_labels, read_label_file, read_label_names
from fedssl.data.site_labels import UNLABELLED
from fedssl.errors import DataError

NAMES = ("1.png", "2.png", "more/3.png")


def _read(folder, text, names=NAMES):
    path = folder / "labels.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_label_file(path, names)


def test_labels_are_returned_in_the_order_of_the_images(tmp_path):
    found = _read(tmp_path, "path,label\nmore/3.png,dog\n./1.png,cat\n2.png,dog\n")
    assert [found.class_names[number] for number in found.labels] == ["cat", "dog", "dog"]
    assert found.places == (f"{tmp_path}/labels.csv, line 2", f"{tmp_path}/labels.csv, line 3")
    assert found.groups is None
    assert not found.is_multi_label


def test_an_empty_label_leaves_the_image_without_one(tmp_path):
    found = _read(tmp_path, "path,label\n1.png,\n2.png,dog\nmore/3.png,cat\n")
    assert found.labels.tolist() == [UNLABELLED, 0, 1]


def test_a_byte_order_mark_quotes_and_windows_line_ends_are_accepted(tmp_path):
    found = _read(tmp_path, b'\xef\xbb\xbfpath,label\r\n1.png,"a, b"\r\n2.png,c\r\n\r\nmore/3.png,c\r\n')
    assert found.class_names == ("a, b", "c")


def test_groups_are_numbered_and_an_image_without_one_is_its_own_group(tmp_path):
    found = _read(tmp_path, "path,label,group\n1.png,a,p7\n2.png,b,\nmore/3.png,b,p7\n")
    assert found.groups.tolist() == [0, 1, 0]


def test_class_columns_give_several_labels_per_image(tmp_path):
    found = _read(tmp_path, "path,red,round,group\n1.png,1,0,g\n2.png,1,1,g\nmore/3.png,,,h\n")
    assert found.class_names == ("red", "round")
    assert found.labels.tolist() == [[1, 0], [1, 1], [UNLABELLED, UNLABELLED]]
    assert found.groups.tolist() == [0, 0, 1]


def test_a_split_column_fixes_the_split(tmp_path):
    found = _read(tmp_path, "path,label,split\n1.png,a,test\n2.png,b,train\nmore/3.png,a,train\n")
    assert found.fixed_test.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: the header needs a column path"),
        ("file,label\n", "line 1: the header needs a column path"),
        ("path\n", "line 1: there is neither a column label nor a column for a class"),
        ("path,label,label\n", "line 1: each column needs a name of its own"),
        ("path,label,age\n", "line 1: there is a column 'age' next to label"),
        ("path,label\n1.png,a,b\n", "line 2: 3 cells, but the header has 2"),
        ("path,label\n9.png,a\n", "line 2: there is no image '9.png' among the 3 images"),
        ("path,label\n1.png,a\n2.png,b\n1.png,a\n", "line 4: '1.png' is in line 2 and here again"),
        ("path,label\n1.png,a\n1.png,b\n", "line 3: '1.png' is in line 2 and here with another label"),
        ("path,label\n1.png,a\n", "lacks 2 of 3 images, the first is '2.png'"),
        ("path,label\n1.png,\n2.png,\nmore/3.png,\n", "has no label: leave the file out"),
        ("path,red\n1.png,yes\n", "line 2: red is 'yes': write 1"),
        ("path,red,blue\n1.png,1,\n", "line 2: blue is '': write 1"),
        ("path,label,split\n1.png,a,val\n", "line 2: split is 'val': write train or test"),
        ("path,label,group,split\n1.png,a,p,test\n2.png,a,p,train\n", "line 3: the group 'p' is in the other split"),
        (b"path,label\n\xff.png,a\n", "is not text in UTF-8"),
        (b'path,label\n"1.png,a\n', "line 2: unexpected end of data"),
    ],
)  # fmt: skip
def test_errors_name_the_file_and_the_line(tmp_path, text, message):
    with pytest.raises(DataError) as raised:
        _read(tmp_path, text)
    assert str(raised.value).startswith(f"{tmp_path}/labels.csv")
    assert message in str(raised.value)


def test_a_missing_or_too_large_file_is_refused(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"cannot read .*labels.csv: No such file"):
        read_label_file(tmp_path / "labels.csv", NAMES)
    monkeypatch.setattr("fedssl.data.label_files.MAX_LABEL_FILE_BYTES", 10)
    with pytest.raises(DataError, match="has 11 bytes, more than a file of labels can have"):
        _read(tmp_path, "path,label\n")
    monkeypatch.undo()
    monkeypatch.setattr("fedssl.data.label_files.MAX_LABEL_CLASSES", 1)
    with pytest.raises(DataError, match="line 3: there are more than 1 classes"):
        _read(tmp_path, "path,label\n1.png,a\n2.png,b\n")


def test_names_are_read_from_a_mapping(tmp_path):
    path = tmp_path / "names.csv"
    path.write_text("own,federation\nCa,tumour\nunclear,\n")
    assert read_label_names(path) == {"Ca": "tumour", "unclear": ""}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n", "line 1: the header must be own,federation"),
        ("own,federation\na\n", "line 2: write the site's own name"),
        ("own,federation\na,b\n\na,c\n", "line 4: 'a' is renamed in line 2 already"),
    ],
)
def test_an_invalid_mapping_is_refused_with_its_line(tmp_path, text, message):
    path = tmp_path / "names.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_label_names(path)


def test_labels_of_folders_and_of_a_file_belong_to_the_same_images(tmp_path):
    for name, grey in (("cat/1.png", 10), ("cat/2.png", 20), ("dog/3.png", 30)):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), grey, np.uint8)).save(tmp_path / "images" / name)
    own = load_site_labels(str(tmp_path / "images"), OWN)
    assert (own.class_names, own.labels.tolist()) == (("cat", "dog"), [0, 0, 1])
    (tmp_path / "l.csv").write_text("path,label\ndog/3.png,x\ncat/1.png,y\ncat/2.png,y\n")
    given = load_site_labels(str(tmp_path / "images"), str(tmp_path / "l.csv"))
    assert [given.class_names[number] for number in given.labels] == ["y", "y", "x"]


def test_images_without_paths_can_only_use_their_own_labels(tmp_path):
    np.savez(tmp_path / "i.npz", images=np.zeros((2, 8, 8), np.uint8), labels=np.array([0, 1]))
    assert load_site_labels(str(tmp_path / "i.npz"), OWN).labels.tolist() == [0, 1]
    with pytest.raises(DataError, match="is a file of images, whose images have no paths"):
        load_site_labels(str(tmp_path / "i.npz"), str(tmp_path / "l.csv"))
