"""Experts of a running model: the pool, its tiers, copies, and compute on the host.

forward                      runs a layer's experts, by the steps of `moetool.caching`
machines, pooled_experts     machines of these steps: a CPU's rows, one product per expert, one product over the pool
grouping                     a layer's choices sorted by expert
store, device_stores         slots and their loads, on one device and on several
source, host_tier, copies    bytes from host memory or disk, and copies to the device
host_compute, cost_meter     experts computed in host memory, and what that costs
signals, event_window        what policies and predictors see
expected_use                 the order of reading ahead
resident_forward, partial_forward  the next router's logits after resident experts
"""
