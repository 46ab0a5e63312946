"""Expert parallelism: ranks in lockstep, experts by plan, all-to-all between them, and new placements for queued
requests.

    startup.py            from placement plan and options to a head; rank_launch.py its ranks as processes
    rank_head.py          one OpenAI engine; batch_loop.py its queue (requests.py) in continuous batches; members.py
                          live ranks, by generation
    placement_state.py    decides on the next placement while serving; batch_placement.py how, with costs
                          of rank_costs.py; staged_migration.py the order of moves
    rank.py               one rank, run by rank_options.py; lockstep.py its batches, step by step
    dispatch.py           an MoE layer over the ranks; process_group.py the collectives, over rank_mesh.py or NCCL
    expert_transfer.py    transfers of experts, in compute phases only (compute_windows.py), to expert_buffers.py

Source: DIRECTOR (§ IV to § VI).
"""
