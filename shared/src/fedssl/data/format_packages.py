"""The packages that read DICOM, NIfTI and Parquet, which are extras."""

import functools
from importlib.util import find_spec
from typing import Literal

Format = Literal["DICOM", "NIfTI", "Parquet"]

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


@functools.cache
def is_installed(package: str) -> bool:
    """Return whether a package is installed. The answer is kept: a folder may hold many files."""
    return find_spec(package) is not None
