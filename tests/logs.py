"""Warnings of moetool in the log of a test."""

import logging

import pytest


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Messages of moetool's warnings, each once; other libraries log too, and a record may arrive twice."""
    records = [r for r in caplog.records if r.name.startswith("moetool") and r.levelno >= logging.WARNING]
    return list(dict.fromkeys(record.getMessage() for record in records))
