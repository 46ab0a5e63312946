"""Claims of papers, and whether they reproduce: recipes, the stage that experiments run on, verdicts, figures.

recipe: a paper's claims, from TOML.          stage: traces and predictors, each made once.
verdict: found values against a claim.        running: a paper from its recipe to its verdicts.
machine: a machine made of assumed costs.     picture: found values as figures.

The experiments are one file each in `moetool.bench.paper.experiments`.
"""
