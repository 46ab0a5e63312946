"""Expert parallelism: ranks in lockstep, experts by plan, all-to-all between them, placed anew for what is queued.

    startup.py            a placement plan and options to a head; rank_launch.py its ranks as processes
    rank_head.py          one OpenAI engine; batch_loop.py its queue (requests.py) in continuous batches, dealt to ranks
                          by request_ranks.py; members.py which ranks are there, by generation
    placement_state.py    decides beside serving what the next placement is; batch_placement.py how, by what
                          rank_costs.py knows of costs; staged_migration.py in which order it comes
    rank.py               one rank, run by rank_options.py; lockstep.py its batches, step by step
    dispatch.py           an MoE layer over the ranks; process_group.py the collectives; replica_routing.py who computes
                          for whom
    expert_transfer.py    experts on their way, in compute phases only (compute_windows.py), to expert_buffers.py

Source: DIRECTOR (§ IV to § VI).
"""
