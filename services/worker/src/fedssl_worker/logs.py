"""Logging to standard error: text on a terminal, JSON lines otherwise. FEDSSL_LOG_FORMAT overrides this."""

import logging
import os
import sys

import structlog
from structlog.typing import Processor

from fedssl.wording import in_one_line_each


def set_up_logging(level: str) -> None:
    """Format messages of structlog and of the standard library alike. Local variables are never printed.

    Raises ValueError if FEDSSL_LOG_FORMAT is neither `json` nor `console`.
    """
    wanted = os.environ.get("FEDSSL_LOG_FORMAT", "")
    if wanted not in ("", "json", "console"):
        raise ValueError(f"FEDSSL_LOG_FORMAT is {wanted!r}: set it to json or console, or leave it out")
    is_terminal = sys.stderr.isatty() if not wanted else wanted == "console"
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if is_terminal else "iso", utc=not is_terminal),
    ]
    render: list[Processor] = (
        [in_one_line_each, structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if is_terminal
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    out = logging.StreamHandler(sys.stderr)
    out.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    logging.basicConfig(handlers=[out], level=level.upper(), force=True)
    for chatty in ("httpx", "httpcore"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
