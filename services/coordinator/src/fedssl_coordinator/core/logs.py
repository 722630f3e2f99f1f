"""Logging: lines for people on a terminal, JSON otherwise, or as FEDSSL_LOG_FORMAT says (`console`, `json`).

Every line says which run, round and client it is about, where that is known: see `say_about`.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import structlog

CHATTY = ("uvicorn.access", "sqlalchemy.engine", "alembic.runtime.plugins")
"""Loggers of which warnings alone are written."""

# One dict for a whole request or task: threads that work for it have copies of the context, which share the dict.
_subject: ContextVar[dict[str, Any] | None] = ContextVar("subject", default=None)


@contextmanager
def about(**subject: Any) -> Iterator[dict[str, Any]]:
    """Everything that is logged inside is about this run, round or client, and what `say_about` adds to it."""
    known = {**(_subject.get() or {}), **subject}
    token = _subject.set(known)
    try:
        yield known
    finally:
        _subject.reset(token)


def say_about(**subject: Any) -> None:
    """From here on, the request or task is known to be about this too. Outside of one nothing happens."""
    found = _subject.get()
    if found is not None:
        found.update({name: value for name, value in subject.items() if value is not None})


def add_subject(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """structlog's processor for it; what a line says itself stays."""
    return {**(_subject.get() or {}), **event}


def is_for_people() -> bool:
    """Whether lines are written for people. Raises ValueError where FEDSSL_LOG_FORMAT is neither form."""
    wanted = os.environ.get("FEDSSL_LOG_FORMAT", "")
    if wanted not in ("", "json", "console"):
        raise ValueError(f"FEDSSL_LOG_FORMAT is {wanted!r}: set it to json or console, or leave it out")
    return sys.stderr.isatty() if not wanted else wanted == "console"


def configure_logging() -> None:
    """Send structlog and the standard library's logging to stderr in one form."""
    shared: list[structlog.typing.Processor] = [
        add_subject,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    # Plain tracebacks: the pretty ones show local variables, and with them secrets.
    form: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if is_for_people()
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    handler = logging.StreamHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *form],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    for chatty in CHATTY:
        logging.getLogger(chatty).setLevel(logging.WARNING)
