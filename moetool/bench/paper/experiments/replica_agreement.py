"""Compare a low-bit replica with its model: agreement of routers, and size."""

from dataclasses import dataclass
from typing import Literal

from moetool.bench.experiment_figure import ExperimentResult
from moetool.bench.paper.verdict import CannotTestError
from moetool.bench.paper.workbench import ALL, MODEL, Workbench
from moetool.models.checkpoint import Checkpoint
from moetool.prompts import gather
from moetool.training.quantize.calibration import Calibration, from_prompts
from moetool.training.quantize.replica import make_replica
from moetool.training.quantize.replica_layers import ReplicaOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the experiment.

    Attributes:
        bits, group, grid: options of the replica (`moetool.training.quantize.replica_layers.ReplicaOptions`).
        tokens: most calibration tokens.
        measure: `match` of its experts with the model's, `size` as a share of the model's bytes.
    """

    bits: int = 4
    group: int = 64
    grid: int = 10
    tokens: int = 8192
    measure: Literal["match", "size"] = "match"


def run(bench: Workbench, options: Options) -> ExperimentResult:
    """Make a replica of the embedded model per seed, which selects the calibration blocks.

    Source: DIRECTOR § V-A and Table II.

    Raises:
        CannotTestError: only traces were given, and a replica needs the model.
    """
    if bench.given:
        raise CannotTestError("a replica needs the model, but only traces were given")
    checkpoint = Checkpoint.open(MODEL)
    texts = [prompt for name in ALL for prompt in gather.load([name])[: bench.sizes.prompts]]
    values: dict[str, list[float]] = {"replica": []}
    for seed in bench.seeds:
        calibration = from_prompts(
            texts, checkpoint.tokenizer, checkpoint.vocab_size, length=128, max_tokens=options.tokens, seed=seed
        )

        def make(calibration: Calibration = calibration) -> dict[str, float]:
            card = make_replica(
                checkpoint,
                bench.folder("replica"),
                calibration,
                ReplicaOptions(bits=options.bits, group=options.group, grid=options.grid),
            )
            return {"match": card["judged"]["match"], "size": card["weights"]["bytes"] / card["weights"]["of_bytes"]}

        rounding = [options.bits, options.group, options.grid, options.tokens]
        made_of = [checkpoint.spec.revision, [text.text for text in texts], rounding, seed]
        values["replica"].append(bench.measured("replica", made_of, make)[options.measure])
    return ExperimentResult(
        values=values,
        what="experts chosen like the model's" if options.measure == "match" else "size, relative to the model",
        exact=options.measure == "size",
        unit="%",
        on=f"{MODEL}, {options.bits} bits in groups of {options.group}, on held-out prompts",
    )
