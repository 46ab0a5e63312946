"""Arguments of `moetool serve --cluster`, before its mode is known."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCommand:
    """Arguments of a cluster command.

    Attributes:
        values: values of `--set`, by name.
        refused: options without effect here, and whether they were given.
        predictor: predictor for proactive placement in expert parallelism.
        profile: costs for its decisions.
    """

    model: str
    plan: Path | None
    cluster: str
    mode: str
    host: str
    port: int
    api_key: str | None = field(repr=False)
    values: Mapping[str, Any]
    refused: Mapping[str, bool]
    predictor: Path | None = None
    profile: Path | None = None
