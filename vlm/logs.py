"""The logger `vlm`: silent below WARNING, unless VLM_LOG_LEVEL or the command line says otherwise."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TextIO

from vlm.errors import PromptError

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def level_from(environ: Mapping[str, str]) -> int | None:
    """The level that VLM_LOG_LEVEL names, None where it is unset. Raises PromptError for a name that is none."""
    name = environ.get("VLM_LOG_LEVEL", "").strip().upper()
    if not name:
        return None
    if name not in LEVELS:
        raise PromptError(f"VLM_LOG_LEVEL={name!r} is no level; use one of {', '.join(LEVELS)}")
    return int(getattr(logging, name))


def configure(environ: Mapping[str, str]) -> None:
    """Honour VLM_LOG_LEVEL in a program that has not set up the logger itself."""
    logger = logging.getLogger("vlm")
    if logger.level != logging.NOTSET:
        return
    level = level_from(environ)
    logger.setLevel(logging.WARNING if level is None else level)
    if level is not None and not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)


def configure_command_line(environ: Mapping[str, str], quiet: bool, stream: TextIO) -> None:
    """What the commands show on stderr: start-up lines and warnings, or only errors; VLM_LOG_LEVEL beats `quiet`."""
    logger = logging.getLogger("vlm")
    level = level_from(environ)
    logger.setLevel((logging.ERROR if quiet else logging.INFO) if level is None else level)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Plain())
    logger.handlers[:] = [handler]
    logger.propagate = False


class _Plain(logging.Formatter):
    """Information as it is; what is worse with its level in front."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno <= logging.INFO else f"{record.levelname.lower()}: {text}"
