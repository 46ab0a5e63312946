"""Claims of papers and whether they reproduce: recipes, stage, experiments, verdicts, figures.

recipe: a paper's claims, from TOML.          stage: traces and predictors, each made once.
verdict: found values against a claim.        running: a paper from its recipe to its verdicts.
machine: a machine with assumed costs.     picture: found values as figures.

Each experiment is a module of `moetool.bench.paper.experiments`.
"""
