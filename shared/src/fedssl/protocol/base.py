"""The base of every wire model."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, StringConstraints
from pydantic_core import PydanticSerializationError

from fedssl.protocol.validation import explained

PROTOCOL_VERSION = 1
"""Incremented when a worker and a coordinator with different versions could misunderstand each other."""

ClientId = Annotated[
    str,
    explained(
        r"^[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?$",
        "a client's name has at most 63 lower-case letters, digits and hyphens, and no hyphen at its ends",
    ),
]
"""A data owner's name: at most 63 lower-case letters, digits and hyphens. Seeds derive from it, so it never changes."""

RegisteredName = Annotated[
    str,
    explained(
        r"^[a-z0-9]+(?:[._-][a-z0-9]+)*$",
        "a registered name has lower-case letters and digits, with single dots, hyphens and underscores between",
        max_length=63,
    ),
]
"""The name of a registered data set, or of registered weights."""

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""sha256 of an artifact's bytes, in lower-case hexadecimal."""

_RAISED_BY_SIGNALS = ("KeyboardInterrupt", "ShutdownRequested")


class StrictModel(BaseModel):
    """An immutable model for which an unknown key is an error: a misspelt setting must never be ignored.

    A key that is added later is therefore left out (`exclude_if`) while it has the value that applied before it
    existed: coordinators and workers of neighbouring versions understand each other, and stored specs stay equal.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def model_dump_json(self, **options: Any) -> str:
        """Return the model as JSON.

        Raises KeyboardInterrupt if a signal arrives meanwhile. Pydantic turns whatever the signal's handler raises into
        a ValueError, which a caller would take for an error of its work.
        """
        try:
            return super().model_dump_json(**options)
        except PydanticSerializationError as error:
            if any(f": {name}: " in str(error) for name in _RAISED_BY_SIGNALS):
                raise KeyboardInterrupt from error
            raise
