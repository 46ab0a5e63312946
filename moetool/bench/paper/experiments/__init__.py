"""Experiments behind `moetool bench paper`, one a file; the file's name is what a recipe calls it.

A module has a frozen dataclass `Options`, filled from the claim's table in the recipe, and

    run(stage: Stage, options: Options) -> Found

which measures by the tool's own mechanism and judges nothing.
"""
