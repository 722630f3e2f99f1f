"""Clients on a page: a short code and a slot in the client key, the same everywhere on it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

SLOTS = 12
"""If there are more clients, a chart draws a band instead of lines, and only pinned clients have colours."""


@dataclass(frozen=True, slots=True)
class Named:
    """`slot` below SLOTS has a colour and a glyph."""

    id: str
    code: str
    slot: int


def named(client_ids: Sequence[str]) -> list[Named]:
    """Return the clients in the given order, each with a unique code."""
    taken: set[str] = set()
    found = []
    for index, client_id in enumerate(client_ids):
        code = next(code for code in _candidates(client_id, index) if code not in taken)
        taken.add(code)
        found.append(Named(client_id, code, index if len(client_ids) <= SLOTS else SLOTS))
    return found


def _candidates(client_id: str, index: int) -> list[str]:
    words = [word for word in re.split(r"[^A-Za-z0-9]+", client_id.upper()) if word]
    if not words:
        return [f"#{index}"]
    letters, *_, last = words[0], words[-1]
    codes = []
    if last.isdigit() and len(words) > 1:
        codes.append(f"{letters[: max(1, 3 - len(last))]}{last}"[:6])
    codes.append(letters[:3])
    if len(words) > 1:
        codes.append(letters[:2] + last[0])
        codes.append(letters[0] + last[:2])
    codes += [letters[:2] + letter for letter in letters[3:]]
    return [*codes, f"#{index}"]
