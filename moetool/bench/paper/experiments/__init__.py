"""Experiments behind `moetool bench paper`, one a file; the file's name is what a recipe calls it.

A module has a frozen dataclass `Options`, filled from the claim's table in the recipe, and

    run(stage: Workbench, options: Options) -> Found

which measures by the tool's own mechanism and judges nothing. `LINKS = True` says that rates of links change what it
measures (`moetool.bench.paper.assumed_machine.AssumedMachine.links`).
"""
