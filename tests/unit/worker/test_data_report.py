"""The report about the images as a whole: it is about the images that the worker has registered."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

from fedssl.protocol.data_card import DataReport
from fedssl_worker.data import load_images
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


@pytest.mark.parametrize("change", ["added", "removed"])
def test_files_that_came_or_went_since_the_registration_have_no_statistics(tmp_path: Path, change: str) -> None:
    """The groups of the labels belong to the images by their positions."""
    folder, lines = tmp_path / "images", ["path,label,group"]
    folder.mkdir()
    for number in range(4):
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (16, 16), np.uint8)).save(
            folder / f"{number}.png"
        )
        lines.append(f"{number}.png,x,patient {number // 2}")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    (tmp_path / "policy.toml").write_text(_POLICY)
    images = load_images(str(folder), torch.device("cpu"))
    labels = load_own_labels(str(folder), str(tmp_path / "labels.csv"), None, images.num_listed)
    sent: list[DataReport] = []
    egress: Any = SimpleNamespace(send_report=sent.append)
    enforcer = PolicyEnforcer(tmp_path / "policy.toml", "https://x")
    if change == "added":
        (folder / "4.png").write_bytes((folder / "0.png").read_bytes())
    else:
        (folder / "0.png").unlink()
    DataReporter(cast(Egress, egress), enforcer, images, labels).send()
    assert not sent
