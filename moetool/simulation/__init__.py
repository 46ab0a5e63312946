"""Discrete-event simulation of a cluster: requests, queues, links, expert calls, migrations.

arrivals             times and servers of requests
workload             routing of requests, from real traces
simulated_costs      seconds of computing and of links
replica_choice       the copy of an expert that a token uses
event_loop           the simulation itself
placement_control    re-placement during the simulation
migration_traffic    moves of experts and their link time
simulation_results   latencies, load and traffic of a run
simulate             one run, from traces and a cluster; sweep: runs over a grid
"""
