"""Logging for the broker: one line per event on standard error, for people on a terminal and as JSON elsewhere.

Called once, by `server.py`. What `structlog`, uvicorn and `gpuboss` (stdlib logging) say goes the same way. Prompts,
answers, images and keys are never logged; what looks like one by its name is blanked all the same.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

_SECRET = re.compile(r"authorization|api_?key|secret|password|prompt|messages|content|image", re.IGNORECASE)
_BEARER = re.compile(r"(?i)\b(bearer\s+)\S+")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_QUIET = ("uvicorn.error", "uvicorn.access", "asyncio", "watchfiles.main")
"""Loggers whose information is of no use to an operator."""


def configure(level: str, stream: TextIO | None = None) -> None:
    """Send every log line of `level` and above to `stream` (standard error)."""
    out = sys.stderr if stream is None else stream
    number = logging.getLevelNamesMapping()[level.upper()]
    before: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        blank,
    ]
    rendering: list[Processor] = (
        [structlog.dev.ConsoleRenderer(colors=True, exception_formatter=structlog.dev.plain_traceback)]
        if out.isatty()
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.add_logger_name, *before],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.add_logger_name,
            *before,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def blank(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Blank what looks secret or private, and keep every text on one line."""
    for key, value in event.items():
        if _SECRET.search(key):
            event[key] = "[blanked]"
        elif isinstance(value, str):
            event[key] = _CONTROL.sub(" ", _BEARER.sub(r"\1[blanked]", value).replace("\n", " | "))
    return event
