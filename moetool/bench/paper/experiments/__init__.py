"""Experiments behind `moetool bench paper`, one per file; recipes use the file's name.

A module has a frozen dataclass `Options`, filled from the claim's table in the recipe, and

    run(stage: Workbench, options: Options) -> Found

which measures by the tool's own mechanism and judges nothing. `LINKS = True` says that rates of links change what it
measures (`moetool.bench.paper.assumed_machine.AssumedMachine.links`).
"""
