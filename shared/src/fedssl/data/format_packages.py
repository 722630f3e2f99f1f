"""The packages that read DICOM, NIfTI and Parquet, which are extras."""

import functools
from typing import Literal

from fedssl import packages

Format = Literal["DICOM", "NIfTI", "Parquet"]

is_installed = functools.cache(packages.is_installed)  # a folder may hold many files

_PACKAGES: dict[Format, str] = {"DICOM": "pydicom", "NIfTI": "nibabel", "Parquet": "pyarrow"}


def why_unread(name: Format) -> str | None:
    """Return why files of a format are left out, or None if its package is installed."""
    if is_installed(_PACKAGES[name]):
        return None
    return f"{name} is not read without its packages: pip install 'fedssl[{name.lower()}]'"


def require(name: Format) -> None:
    """Raise ValueError if files of a format are not read."""
    if (why := why_unread(name)) is not None:
        raise ValueError(why)
