"""Words of messages for people."""


def plural(count: int, one: str, many: str | None = None) -> str:
    """Return a count with its noun, which is in the singular only for 1.

    >>> plural(1, "round"), plural(1200, "round"), plural(0, "entry", "entries")
    ('1 round', '1,200 rounds', '0 entries')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"
