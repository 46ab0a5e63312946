"""The runtime that runs models larger than memory: batching, KV cache, expert pools and memory tiers.

assembly                     an engine from a model, memory and a policy, by serve_options; automatic chooses them
budget                       the division of memory; its parts are sizing, expected_reads and memory_share
loop/                        the engine's thread: batches, forwards, sampling; with request, decoding, decode_graphs
kv/                          pages of the KV cache
experts/                     the pool and its tiers; returned_memory
recording/                   gate logs
warm_start, policy_state     what a server keeps for its next start; so do split_costs, of link and host
"""
