"""Logging: readable lines on a terminal, JSON otherwise, or the form in FEDSSL_LOG_FORMAT (`console` or `json`).

Every line contains the run, the round and the client that it is about, if they are known: see `say_about`.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import structlog

from fedssl.wording import in_one_line_each

CHATTY = ("uvicorn.access", "sqlalchemy.engine", "alembic.runtime.plugins")
"""Loggers from which only warnings and errors are written."""

# One dict per request or task: its threads have copies of the context, which share the dict.
_subject: ContextVar[dict[str, Any] | None] = ContextVar("subject", default=None)


@contextmanager
def about(**subject: Any) -> Iterator[dict[str, Any]]:
    """Add a run, a round or a client to every line that is logged in the block, and what `say_about` adds later."""
    known = {**(_subject.get() or {}), **subject}
    token = _subject.set(known)
    try:
        yield known
    finally:
        _subject.reset(token)


def say_about(**subject: Any) -> None:
    """Add this to every following line of the request or task. Has no effect outside of one."""
    found = _subject.get()
    if found is not None:
        found.update({name: value for name, value in subject.items() if value is not None})


def add_subject(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Add the subject to a line, as a processor of structlog. A line's own values take precedence."""
    return {**(_subject.get() or {}), **event}


def is_for_people() -> bool:
    """Return whether lines are written in readable form. Raises ValueError if FEDSSL_LOG_FORMAT is invalid."""
    wanted = os.environ.get("FEDSSL_LOG_FORMAT", "")
    if wanted not in ("", "json", "console"):
        raise ValueError(f"FEDSSL_LOG_FORMAT is {wanted!r}: set it to json or console, or leave it out")
    return sys.stderr.isatty() if not wanted else wanted == "console"


def configure_logging() -> None:
    """Send the logs of structlog and of the standard library to stderr in one form."""
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
    # Plain tracebacks: the formatted ones show local variables, which may contain secrets.
    form: list[structlog.typing.Processor] = (
        [in_one_line_each, structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
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
