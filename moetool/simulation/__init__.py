"""Simulation of a cluster: edge servers event by event, and expert-parallel ranks in lockstep.

arrivals             times and servers of requests
workload             routing of requests, from real traces
simulated_costs      seconds of computing and of links
replica_choice       the copy of an expert that a token uses on edge servers
event_loop           edge servers: requests, queues, links, expert calls
migration_traffic    moves of experts between edge servers and their link time
rank_seconds         costs of a rank
lockstep             one step of ranks, with a barrier in every layer
lockstep_serving     batches of ranks, and placements between them
placement_control    re-placement during the simulation
simulation_results   latencies, load and traffic of a run
simulate             one run, from traces and a cluster; sweep: runs over a grid
"""
