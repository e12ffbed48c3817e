"""The log: one JSON object a line on standard error, or plain lines for a person at a terminal."""

import logging
import logging.config

_HANDLERS = {
    "json": {
        "()": "pythonjsonlogger.json.JsonFormatter",
        "format": "%(levelname)s %(name)s %(message)s",
        "rename_fields": {"levelname": "level", "name": "logger"},
        "timestamp": "time",
    },
    "text": {"format": "%(asctime)s %(levelname)-7s %(name)s: %(message)s"},
}


def configure_logging(level: str, style: str) -> None:
    """``style``: ``json`` or ``text``."""
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": _HANDLERS[style]},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
            "root": {"level": level.upper(), "handlers": ["stderr"]},
            "loggers": {
                "uvicorn": {"level": "WARNING"},
                "httpx": {"level": "WARNING"},
            },
        }
    )
