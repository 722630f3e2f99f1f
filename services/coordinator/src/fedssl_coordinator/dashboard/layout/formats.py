"""Numbers and times as people read them. Missing numbers are a dash, and minus is a minus sign."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.wording import plural
from fedssl_coordinator.core import database_clock

NOTHING = "–"
_MINUS = "\u2212"
_MEASURES = {"probe": "linear probe", "knn": "kNN", "geometry": "alignment, uniformity, effective rank"}


def number(value: float | None, places: int = 0) -> str:
    """Return a number with separators: `48,210`."""
    return NOTHING if value is None else f"{value:,.{places}f}".replace("-", _MINUS)


def percent(value: float | None, places: int = 1) -> str:
    """Return a share, 0..1, in percent."""
    return NOTHING if value is None else number(100 * value, places) + "%"


def points(value: float | None) -> str:
    """Return a change of a share, in percentage points with its sign."""
    if value is None:
        return NOTHING
    shown = f"{100 * value:+.1f}".replace("-", _MINUS)
    return "±0" if shown in ("+0.0", f"{_MINUS}0.0") else shown


def short(value: float | None) -> str:
    """Return a number with three significant digits, or a whole number if it has more."""
    if value is None:
        return NOTHING
    return number(value) if 100 <= abs(value) < 1e9 else f"{value:.3g}".replace("e-0", "e-").replace("-", _MINUS)


def in_bytes(value: float | None) -> str:
    """Return a number of bytes in decimal units, with three digits: `2.56 MB`."""
    if value is None:
        return NOTHING
    amount, units = float(value), ["B", "kB", "MB", "GB", "TB", "PB"]
    while amount >= 999.5 and len(units) > 1:
        amount, units = amount / 1000, units[1:]
    places = 0 if units[0] == "B" or amount >= 99.95 else 1 if amount >= 9.995 else 2
    return f"{amount:.{places}f} {units[0]}"


def seconds(value: float | None) -> str:
    """Return a duration in its two largest units: `6 h 10 min`."""
    if value is None:
        return NOTHING
    whole = round(max(value, 0))
    if whole < 60:
        return f"{whole} s"
    sizes, names = (86_400, 3_600, 60, 1), ("d", "h", "min", "s")
    first = next(index for index, size in enumerate(sizes) if whole >= size)
    parts = [(whole // sizes[first], names[first])]
    if first < 3:
        parts.append((whole % sizes[first] // sizes[first + 1], names[first + 1]))
    return " ".join(f"{count} {name}" for count, name in parts if count)


def ago(value: datetime | None) -> str:
    """Return roughly how long ago a time was, in its largest unit."""
    if value is None:
        return "never"
    passed = (database_clock.now() - value).total_seconds()
    return "now" if passed < 1 else f"{seconds(passed).split(' ')[0]} {seconds(passed).split(' ')[1]} ago"


def exact(value: datetime | None) -> str:
    """Return a time in UTC to the second, for people."""
    return NOTHING if value is None else value.astimezone(UTC).strftime("%-d %b %Y %H:%M:%S UTC")


def day(value: datetime | None) -> str:
    return NOTHING if value is None else value.astimezone(UTC).strftime("%-d %b")


def day_time(value: datetime | None) -> str:
    """Return a time in UTC to the minute, without the year: `23 Nov 14:03`."""
    return NOTHING if value is None else value.astimezone(UTC).strftime("%-d %b %H:%M")


def clock(value: datetime | None) -> str:
    return NOTHING if value is None else value.astimezone(UTC).strftime("%H:%M:%S")


def machine(value: datetime | None) -> str:
    """Return a time for programs, as in the attribute `datetime`."""
    return "" if value is None else value.astimezone(UTC).isoformat(timespec="seconds")


def shape(client: Any) -> str:
    """Return the shape of a client's images: `3 × 32 × 32`, channels first."""
    return f"{client.channels} × {client.image_size} × {client.image_size}" if client.channels else NOTHING


def measure(name: str) -> str:
    """Return the name of a group of an evaluation's results, such as `probe`, in words; any other name as it is."""
    return _MEASURES.get(name, name)


def method(name: str) -> str:
    """Return a method's title, or its name if this version does not have the method."""
    return METHOD_CONFIGS[name].info.title if name in METHOD_CONFIGS else name


def sentence(text: str) -> str:
    """Return a reason as a sentence. A first word that is not only letters, such as a client's name, stays as it is.

    >>> sentence("no update came"), sentence("client-0: no update came")
    ('No update came.', 'client-0: no update came.')
    """
    start = text[:1].upper() if text.split(" ")[0].isalpha() else text[:1]
    return f"{start}{text[1:]}."


def digest(value: str | None) -> str:
    """Return the first eight digits in two groups of four."""
    return NOTHING if not value else f"{value[:4]} {value[4:8]}"


FILTERS: Mapping[str, Callable[..., Any]] = {
    "number": number,
    "percent": percent,
    "points": points,
    "short": short,
    "bytes": in_bytes,
    "seconds": seconds,
    "ago": ago,
    "exact": exact,
    "day": day,
    "day_time": day_time,
    "clock": clock,
    "machine": machine,
    "shape": shape,
    "measure": measure,
    "method": method,
    "digest": digest,
    "sentence": sentence,
    "plural": plural,
}
