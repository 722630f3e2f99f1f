"""The packages that read DICOM and NIfTI, which are extras."""

import functools
from importlib.util import find_spec
from typing import Literal

MedicalFormat = Literal["DICOM", "NIfTI"]

_PACKAGES: dict[MedicalFormat, str] = {"DICOM": "pydicom", "NIfTI": "nibabel"}


def why_unread(name: MedicalFormat) -> str | None:
    """Return why files of a format are left out, or None if its package is installed."""
    if is_installed(_PACKAGES[name]):
        return None
    return f"{name} is not read without its packages: pip install 'fedssl[{name.lower()}]'"


def require(name: MedicalFormat) -> None:
    """Raise ValueError if files of a format are not read."""
    if (why := why_unread(name)) is not None:
        raise ValueError(why)


@functools.cache
def is_installed(package: str) -> bool:
    """Return whether a package is installed. The answer is kept: a folder may hold many files."""
    return find_spec(package) is not None
