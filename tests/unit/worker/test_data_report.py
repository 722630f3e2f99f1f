"""The report about a worker's images as a whole covers exactly the images that the worker has registered."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

from fedssl.protocol.data_card import DataReport
from fedssl_worker.data import OwnImages
from fedssl_worker.data_report import DataReporter
from fedssl_worker.disclosure.egress import Egress
from fedssl_worker.disclosure.policy import PolicyEnforcer
from fedssl_worker.labels import load_own_labels

_POLICY = """
schema = 1
client = "a"
coordinator = "https://x"
[[allow]]
artifact = "statistics"
methods = ["*"]
min_count = 2
"""
_SUMS = _POLICY.replace("statistics", "channel-sums")


class Site:
    """A folder of 16 x 16 images in which each patient, as a group, has two images."""

    def __init__(self, folder: Path, policy: str = _POLICY, *, num_images: int = 4) -> None:
        self.folder, self.images = folder, folder / "images"
        self.images.mkdir()
        self.sent: list[DataReport] = []
        (folder / "policy.toml").write_text(policy)
        for number in range(num_images):
            self.add(number)

    def add(self, number: int) -> None:
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (16, 16), np.uint8)).save(
            self.images / f"{number}.png"
        )

    def reporter(self, *, with_groups: bool = False) -> DataReporter:
        """Return the reporter of a worker that was started with the images that the folder has now."""
        images, labels = OwnImages(str(self.images), torch.device("cpu")), None
        if with_groups:
            lines = [f"{path.name},x,patient {int(path.stem) // 2}" for path in sorted(self.images.iterdir())]
            (self.folder / "labels.csv").write_text("\n".join(["path,label,group", *lines]))
            labels = load_own_labels(str(self.images), str(self.folder / "labels.csv"), None, images.num_listed)
        egress: Any = SimpleNamespace(send_report=self.sent.append)
        enforcer = PolicyEnforcer(self.folder / "policy.toml", "https://x")
        return DataReporter(cast(Egress, egress), enforcer, images, labels, self.folder / "data-reports.json")


@pytest.mark.parametrize("change", ["added", "removed"])
def test_no_report_is_sent_if_files_were_added_or_removed_since_the_registration(tmp_path: Path, change: str) -> None:
    """The groups in the labels are matched to the images by position."""
    site = Site(tmp_path)
    reporter = site.reporter(with_groups=True)
    if change == "added":
        site.add(4)
    else:
        (site.images / "0.png").unlink()
    reporter.send()
    assert not site.sent


def test_two_reports_differ_by_at_least_as_many_images_as_each_number_needs(tmp_path: Path) -> None:
    """Otherwise two sums, with and without one image, would give the mean of that image's pixels."""
    site = Site(tmp_path, _SUMS)
    site.reporter().send()
    site.reporter().send()  # the same images give nothing new
    site.add(4)
    site.reporter().send()
    assert [report.sums.num_images for report in site.sent if report.sums] == [4, 4]
    (site.images / "0.png").unlink()
    site.reporter().send()  # as many images as before, but two of them differ
    assert len(site.sent) == 2
    for number in (0, 5):
        site.add(number)
    site.reporter().send()
    assert [report.sums.num_images for report in site.sent if report.sums] == [4, 4, 6]
    (site.images / "0.png").unlink()
    site.reporter().send()
    assert len(site.sent) == 3


def test_two_reports_differ_by_at_least_two_patients(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.reporter(with_groups=True).send()
    for number in (4, 5):
        site.add(number)
    site.reporter(with_groups=True).send()
    assert len(site.sent) == 1
    for number in (6, 7):
        site.add(number)
    site.reporter(with_groups=True).send()
    assert [report.card.num_groups for report in site.sent if report.card] == [2, 4]


def test_a_report_that_a_new_policy_forbids_is_withdrawn_even_if_few_images_changed(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.reporter().send()
    site.add(4)
    (tmp_path / "policy.toml").write_text(_SUMS)
    site.reporter().send()
    assert [(report.card is None, report.sums is None) for report in site.sent] == [(False, True), (True, True)]


def test_no_report_is_sent_if_the_record_of_earlier_reports_is_damaged(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.reporter().send()
    (tmp_path / "data-reports.json").write_text("{")
    site.reporter().send()
    assert len(site.sent) == 1


def test_statistics_follow_the_strictest_rule_and_are_denied_if_privacy_is_required(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(_POLICY + '[[allow]]\nartifact = "statistics"\nmethods = ["*"]\n')
    assert PolicyEnforcer(path, "https://x").images_min_count("statistics") == 10
    path.write_text(_POLICY + '[dp]\nrequire = "example"\n')
    assert PolicyEnforcer(path, "https://x").images_min_count("statistics") is None
