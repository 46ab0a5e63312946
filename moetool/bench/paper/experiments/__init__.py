"""Experiments behind `moetool bench paper`, one per file; recipes use the file's name.

A module has a frozen dataclass `Options`, filled from the claim's table in the recipe, and

    run(bench: Workbench, options: Options) -> ExperimentResult

which measures with the same code as the commands and judges nothing. `LINKS = True` marks an experiment whose values
depend on the rates of links (`moetool.bench.paper.assumed_machine.AssumedMachine.links`), `DESCRIBES_COSTS = True` one
whose results say what costs they have.
"""
