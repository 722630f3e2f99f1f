"""The identity of a file of representations: the encoder, how images are prepared for it, and the images."""

from collections.abc import Mapping
from typing import Any


def difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Return, in words, how the identity `found` differs from `wanted`, or an empty text if it does not.

    Only what `wanted` names is compared.
    """
    if _digest(found, "encoder") != _digest(wanted, "encoder"):
        return f"another encoder (sha256 {_digest(found, 'encoder')}, not {_digest(wanted, 'encoder')})"
    if found.get("preprocessing") != wanted["preprocessing"]:
        return f"images that are prepared in another way ({found.get('preprocessing')})"
    if "images" in wanted and _digest(found, "images") != _digest(wanted, "images"):
        return "other images, or of images that have changed since"
    return ""


def _digest(about: Mapping[str, Any], what: str) -> str:
    part = about.get(what)
    return str(part.get("sha256"))[:16] if isinstance(part, dict) else "unknown"
