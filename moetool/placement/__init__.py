"""Placement of experts on a cluster: planners, what they plan from, scores, migrations, and the one decision.

planner                      inputs and common rules of planners; planners/ has one planner per file
demand, recall               tokens that use each expert: from traces, and expected
cluster_file                 a cluster from its TOML file
scoring, latency             scores of a placement
relaxation, rounding         DIRECTOR's programme of a layer; least_remote Prism's; linear_programme solves both
local_search, expert_copies  improvements of a layer: one copy per expert, and further copies
gpus, engine_slots           experts of a server on its GPUs; equal slots, as engines need
request_ranks                the rank on which a request starts; replica_routing the copy that a token uses
plan, migration              plans, and the order of moves between them
decide                       whether to migrate, in plans, simulations and live clusters; replacement_record its result
modes, comparison            planners on a stream of batches, and on held-out requests
export_slots                 common parts of exports/, one format of another engine per file
"""
