"""Discrete-event simulation of a cluster: requests, queues, links, expert calls, migrations.

arrivals: when requests come, and to which server.   workload: what they route to, from real traces.
costs: seconds of computing and of links.            routing: which copy of an expert a token goes to.
engine: the event loop.                              control: who places experts, when, and from what.
moving: experts on their way, with link time.        results: what comes out.
running: all of it put together.                     sweeping: the same over a grid.
"""
