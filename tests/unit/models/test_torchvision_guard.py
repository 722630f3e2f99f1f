"""The guard in fresh processes: it must work whatever was tried before it."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.full


PROGRAM = """
from fedssl.models.torchvision_guard import import_torchvision
{before}
torchvision = import_torchvision()
import torchvision.datasets, torchvision.transforms.v2, torchvision.utils
torchvision.models.resnet18(weights=None)
"""
FAILED_IMPORT = """
try:
    import torchvision
except RuntimeError:
    pass
"""


def test_torchvision_is_imported_in_a_fresh_process_and_after_a_failed_import() -> None:
    for before in ("", FAILED_IMPORT):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(before=before)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
