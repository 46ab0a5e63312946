"""The report of `moetool verify`: for a terminal, and as a file to attach to a bug report.

A report names no folder, no user and no text of a prompt.
"""

import json
import platform
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moetool import __version__
from moetool.base import durable
from moetool.base.errors import UsageError
from moetool.base.machine import Machine
from moetool.base.tables import count, numbered
from moetool.measuring.library_weights import OURS
from moetool.measuring.verification import Comparison, PolicyResult
from moetool.models.checkpoint import Checkpoint
from moetool.models.files.hub import parse_hub_name, snapshot_name
from moetool.models.libraries import read_machine

SUFFIXES = (".md", ".json")
_WORDS = {
    "exact": "exact: every answer equals that of plain transformers",
    "ties": "ties: answers differ from plain transformers only where two tokens are equally likely",
    "differs": "differs from plain transformers",
}
_PROMISE = "policies: the same bits for one batch composition; against transformers: equal up to rounding, "
"""The promises of lossless policies, before what the data type makes of the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A comparison with its model, machine and versions.

    Attributes:
        model: name of the model, without its folder.
        commit: commit of a model from the hub; else empty.
        revision: moetool's digest of config and weights.
        weights: weight formats with their numbers of weights.
        expert_bytes: stored bytes of an expert.
        versions: versions of moetool, Python and the compute libraries.
    """

    model: str
    commit: str
    revision: str
    family: str
    weights: dict[str, int]
    num_layers: int
    num_experts: int
    expert_bytes: int
    machine: Machine
    device: str
    versions: dict[str, str]
    comparison: Comparison

    @property
    def verdict_line(self) -> str:
        made = self.comparison
        tail = f"; {made.first}" if made.first else ""
        return f"{self.model}: {_WORDS[made.verdict]}{tail}"

    @property
    def hint(self) -> str:
        """Return advice to the user; empty if there is none."""
        made = self.comparison
        if made.verdict != "differs":
            return ""
        causes = made.contradictions or any(True for layer in made.layers for _ in layer.problems(made.tolerance))
        worst = max((row.logits_max for row in made.policies if not row.skipped), default=0.0)
        if made.dtype != "float32" and not causes and worst <= made.logits_limit:
            return f"the logits agree within rounding of {made.dtype}; --dtype float32 decides"
        return "attach the report to a bug report"

    def to_json(self) -> dict[str, Any]:
        made = self.comparison
        return {
            "kind": "verification",
            "schema_version": 1,
            "verdict": made.verdict,
            "first": made.first,
            "problems": made.problems,
            **{key: value for key, value in asdict(self).items() if key != "comparison"},
            **asdict(made),
            "logits_limit": made.logits_limit,
        }

    def facts(self) -> list[tuple[str, str]]:
        """Return names and values of model, machine and versions."""
        made, machine = self.comparison, self.machine
        gpu = f", {machine.gpu} ({count(machine.gpu_memory_bytes, 'B')})" if machine.gpu else ""
        weights = ", ".join(f"{number:,} tensors {name}" for name, number in self.weights.items())
        checked = sum(layer.experts_compared for layer in made.layers)
        tensors = sum(layer.tensors for layer in made.layers)
        routes = sum(layer.routes for layer in made.layers)
        route_ties = sum(layer.route_ties for layer in made.layers)
        wrong = sum(layer.route_errors for layer in made.layers)
        worst = max(made.layers, key=lambda layer: layer.difference / (layer.scale or 1.0))
        yardstick = "the family has one implementation"
        if made.yardstick_max is not None:
            yardstick = f"{made.yardstick_max:.3g} at most, {made.yardstick_mean:.3g} on average"
        read = [(part, reader) for part, reader in made.read_by.items() if reader != OURS]
        alone = [part for part, reader in made.read_by.items() if reader == OURS]
        return [
            ("model", f"{self.model}{f' at {self.commit}' if self.commit else ''}, {self.family}"),
            ("revision", self.revision),
            ("weights", f"{weights}; {self.num_experts:,} experts of {count(self.expert_bytes, 'B')}"),
            ("plain transformers", f"{made.oracle}, {'whole' if made.whole else 'layer by layer'}, {made.dtype}"),
            ("read by other libraries", ", ".join(f"{part}: {reader}" for part, reader in read)),
            ("read by moetool alone", ", ".join(alone) or "nothing"),
            (
                "promise",
                _PROMISE + ("so the same tokens but at ties" if made.dtype == "float32" else "so tokens may differ"),
            ),
            ("compared", f"{numbered(len(made.prompts), 'prompt')}, {numbered(made.num_tokens, 'token')} each"),
            ("weights compared", f"{checked:,} experts in a slot, {tensors:,} other tensors"),
            ("experts chosen", f"{routes - route_ties - wrong:,} of {routes:,} equal, {route_ties:,} ties"),
            ("layer outputs", f"{worst.difference:.3g} of {worst.scale:.3g} apart at most, in layer {worst.layer}"),
            ("eager to grouped", f"logits of plain transformers: {yardstick}"),
            ("machine", f"{machine.cpu}, {machine.cores} cores, {count(machine.memory_bytes, 'B')}{gpu}"),
            ("device", self.device),
            ("versions", ", ".join(f"{name} {version}" for name, version in self.versions.items())),
        ]

    def rows(self) -> list[list[str]]:
        """Return the table of policies."""
        return [_row(row) for row in self.comparison.policies if not row.skipped]

    @property
    def skipped(self) -> list[str]:
        """Return the skipped policies with their reasons."""
        return [f"{row.policy} ({row.skipped})" for row in self.comparison.policies if row.skipped]

    def to_markdown(self) -> str:
        lines = ["# moetool verify", "", f"**{self.verdict_line}**", ""]
        lines += [f"- {problem}" for problem in self.comparison.problems[:20]]
        lines += ["", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in self.facts()), ""]
        lines += [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
        lines += [f"| {' | '.join(row)} |" for row in self.rows()]
        if self.skipped:
            lines += ["", f"Not compared: {'; '.join(self.skipped)}"]
        lines += ["", "<details><summary>Everything as JSON</summary>", "", "```json"]
        lines += [json.dumps(self.to_json(), indent=1), "```", "", "</details>", ""]
        return "\n".join(lines)

    def save(self, path: Path) -> None:
        """Write the report as Markdown or JSON, by its suffix."""
        text = self.to_markdown() if path.suffix == ".md" else json.dumps(self.to_json(), indent=1) + "\n"
        durable.write_text(path, text)


COLUMNS = ["policy", "slots", "exact", "ties", "differ", "logits apart, max", "mean", "same bits"]


def require_report_file(path: Path, overwrite: bool) -> None:
    """Raises: UsageError for a file that cannot hold a report."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--out {path} ends in {path.suffix!r}, expected {' or '.join(SUFFIXES)}")
    durable.require_new_file(path, overwrite)


def report_on(checkpoint: Checkpoint, comparison: Comparison, device: str) -> Report:
    """Add model, machine and versions to a comparison."""
    import numpy
    import safetensors

    spec, path, machine = checkpoint.spec, checkpoint.path, read_machine()
    hub = None if Path(checkpoint.name).exists() else parse_hub_name(checkpoint.name)
    formats = Counter(weight.format for weight in checkpoint.weight_index.weights.values())
    return Report(
        model=hub.model if hub is not None else snapshot_name(path) or path.name,
        commit=path.name if snapshot_name(path) else "",
        revision=spec.revision,
        family=str(checkpoint.config.model_type),
        weights=dict(formats),
        num_layers=spec.num_layers,
        num_experts=spec.total_experts,
        expert_bytes=spec.slot_bytes,
        machine=machine,
        device=device,
        versions={
            "moetool": __version__,
            "torch": machine.torch,
            "transformers": machine.transformers,
            "safetensors": safetensors.__version__,
            "numpy": numpy.__version__,
            "Python": platform.python_version(),
        },
        comparison=comparison,
    )


def _row(row: PolicyResult) -> list[str]:
    counts = [str(number) for number in (row.slots, row.exact, row.ties, row.differing)]
    apart = [f"{row.logits_max:.3g}", f"{row.logits_mean:.3g}"]
    return [row.policy, *counts, *apart, "yes" if row.same_bits else "no"]
