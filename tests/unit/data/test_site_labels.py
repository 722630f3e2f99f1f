"""The labels of a site: renaming to the classes of the run, and the split into training and test images."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedssl.data.images import ImageData
from fedssl.data.site_labels import UNLABELLED, SiteLabels, own_labels, split_labels, with_run_classes
from fedssl.errors import DataError


def _labels(numbers, names=("a", "b", "c"), **more):
    return SiteLabels(
        np.array(numbers, np.int64), names, tuple(f"l.csv, line {n + 2}" for n in range(len(names))), **more
    )


def test_labels_of_a_data_set_keep_their_names():
    images = ImageData(np.zeros((3, 1, 8, 8), np.uint8), np.array([1, 0, 1]), ("cat", "dog"))
    found = own_labels(images, "folder")
    assert (found.class_names, found.labels.tolist()) == (("cat", "dog"), [1, 0, 1])
    assert own_labels(ImageData(images.images, images.labels), "f").class_names == ("0", "1")
    with pytest.raises(DataError, match="folder has no labels: put the images into one folder per class"):
        own_labels(ImageData(images.images), "folder")


def test_classes_get_the_numbers_of_the_run():
    found = with_run_classes(_labels([0, 1, 2, UNLABELLED]), ("c", "x", "a", "b"), multi_label=False)
    assert found.labels.tolist() == [2, 3, 0, UNLABELLED]
    assert found.class_names == ("c", "x", "a", "b")


def test_renamed_classes_may_merge_and_an_empty_name_removes_a_class():
    renamed = {"a": "tumour", "b": "tumour", "c": ""}
    found = with_run_classes(_labels([0, 1, 2]), ("healthy", "tumour"), multi_label=False, renamed=renamed)
    assert found.labels.tolist() == [1, 1, UNLABELLED]


def test_an_unknown_class_is_reported_with_its_line_and_the_runs_classes():
    with pytest.raises(
        DataError, match=r"l.csv, line 3: 'b' is not a class of the run, which has a, d; 2 of this site's 3"
    ):
        with_run_classes(_labels([0, 1, 2]), ("a", "d"), multi_label=False)


def test_a_class_without_images_is_not_checked():
    assert with_run_classes(_labels([0, 0]), ("a",), multi_label=False).labels.tolist() == [0, 0]


def test_without_also_removes_the_groups_and_the_fixed_split():
    labels = _labels([0, 1, 2, 0], groups=np.array([5, 6, 7, 8]), fixed_test=np.array([True, False, True, False]))
    found = labels.without([1, 2])
    assert (found.labels.tolist(), found.groups.tolist(), found.fixed_test.tolist()) == ([0, 0], [5, 8], [True, False])


def test_several_labels_per_image_become_columns_of_the_run():
    rows = _labels([[1, 0], [1, 1], [UNLABELLED, UNLABELLED]], ("a", "b"))
    found = with_run_classes(rows, ("b", "z", "a"), multi_label=True)
    assert found.labels.tolist() == [[0, 0, 1], [1, 0, 1], [UNLABELLED] * 3]


@pytest.mark.parametrize(("numbers", "multi_label"), [([0, 1], True), ([[1, 0], [0, 1]], False)])
def test_a_different_number_of_labels_per_image_is_refused(numbers, multi_label):
    with pytest.raises(DataError, match=r"evaluation\.sites\.multi_label"):
        with_run_classes(_labels(numbers, ("a", "b")), ("a", "b"), multi_label=multi_label)


def test_each_class_gives_its_share_to_the_test_split():
    labels = _labels([0] * 50 + [1] * 20 + [UNLABELLED] * 5 + [2])
    split = split_labels(labels, 0.2, seed=3)
    assert np.bincount(labels.labels[split.test], minlength=3).tolist() == [10, 4, 0]
    assert sorted([*split.train, *split.test]) == [*range(70), 75]
    again, other = split_labels(labels, 0.2, seed=3), split_labels(labels, 0.2, seed=4)
    assert again.test.tolist() == split.test.tolist() != other.test.tolist()


def test_a_split_fixed_by_the_site_is_kept():
    labels = _labels([0, 1, 0, UNLABELLED], fixed_test=np.array([True, False, False, True]))
    split = split_labels(labels, 0.9, seed=0)
    assert (split.train.tolist(), split.test.tolist()) == ([1, 2], [0])


@given(
    numbers=st.lists(st.integers(UNLABELLED, 2), min_size=1, max_size=60),
    num_groups=st.integers(1, 30),
    share=st.floats(0.05, 0.95),
    seed=st.integers(0, 2**62),
)
def test_a_group_is_never_in_both_splits(numbers, num_groups, share, seed):
    groups = np.arange(len(numbers)) * 7 % num_groups
    labels = _labels(numbers, groups=groups)
    split = split_labels(labels, share, seed)
    assert not set(groups[split.train]) & set(groups[split.test])
    assert sorted([*split.train, *split.test]) == np.flatnonzero(labels.is_labelled).tolist()
    # Each stratum rounds its share: one per class, and one for groups of several classes.
    assert len(split.test) <= share * labels.is_labelled.sum() + 4 * 0.5
