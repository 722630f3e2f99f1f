"""The rights of a token's owner, and how long they last."""

import re
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field


class Role(StrEnum):
    """The role of a token. With `ENROLMENT`, a worker can become a `WORKER` once, at its first start."""

    ADMIN = "admin"
    OPERATOR = "operator"
    VIEWER = "viewer"
    WORKER = "worker"
    ENROLMENT = "enrolment"


LastingRole = Literal["admin", "operator", "viewer", "worker"]
"""The roles of tokens that can be used more than once."""

PersonRole = Literal["admin", "operator", "viewer"]
"""The roles of people, who may sign in to the web page."""

DAY_SECONDS = 24 * 60 * 60
LONGEST_SECONDS = 3650 * DAY_SECONDS

LifetimeSeconds = Annotated[int, Field(ge=1, le=LONGEST_SECONDS, description="From now on, by the database's clock.")]

_DURATION = re.compile(r"([0-9]{1,9})([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 60 * 60, "d": DAY_SECONDS}


def lifetime(text: str) -> int:
    """Return the seconds of a lifetime as a person writes it. Raises ValueError if it is malformed or out of range.

    >>> lifetime("30d"), lifetime("24h"), lifetime("90s")
    (2592000, 86400, 90)
    """
    found = _DURATION.fullmatch(text.strip())
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= LONGEST_SECONDS:
        raise ValueError("write a number and s, m, h or d for seconds, minutes, hours or days, up to 3650d: 30d, 24h")
    return seconds
