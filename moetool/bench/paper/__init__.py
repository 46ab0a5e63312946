"""Claims of papers and whether they reproduce: recipes, stage, experiments, verdicts, figures.

claims: a paper's claims, from TOML.             workbench: traces and predictors, each made once.
verdict: found values against a claim.           paper_run: a paper from its recipe to its verdicts.
assumed_machine, named_machine: assumed costs.   found_figure: found values as figures.

Each experiment is a module of `moetool.bench.paper.experiments`.
"""
