"""The result of a check of `fedssl doctor`."""

from dataclasses import dataclass
from enum import StrEnum


class Found(StrEnum):
    """`WRONG` makes the command fail; `NOTE` is for what works, but may not be what the user wants."""

    OK = "ok"
    NOTE = "note"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. `todo` describes what to do, and is empty if nothing needs to be done."""

    name: str
    found: Found
    what: str
    todo: str = ""
