"""Which experts are in memory: the contract of a policy, residency, and the steps of an event.

policy                       the contract; policies/ has one policy per file
residency                    turns an event into steps: a miss becomes a load here, or a computation on the host
program                      runs these steps on a machine
devices                      several devices of one machine, each with its own residency
layer_slots                  slots guaranteed to each layer
host_split                   misses that the host computes, by policies that split them themselves
machine_split                the same above any policy, by the time of link, host and device
prediction_thread            a predictor beside the model
plan                         cache plans
decision_digest              comparison of `replay` with `serve`
"""
