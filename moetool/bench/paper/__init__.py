"""Claims of papers and whether they reproduce: recipes, experiments, verdicts, figures.

claims: a paper's claims, from TOML.             workbench: traces and predictors, each made once.
samples: values and curves of an experiment.     verdict: measured values against a claim.
assumed_machine, named_machine: assumed costs.   paper_run: a paper from its recipe to its verdicts.
paper_results: tables of claims and verdicts.

Each experiment is a module of `moetool.bench.paper.experiments`.
"""
