"""Expert parallelism: ranks in lockstep, experts by plan, all-to-all between them, placed anew for what is queued.

    head.py       one OpenAI engine: queue, static batches, ranks that die; control.py decides on placements
    rank.py       one rank: its batch, its experts, step by step with the others
    dispatch.py   an MoE layer over the ranks; group.py the collectives; routing.py who computes for whom
    migration.py  experts on their way, in compute phases only (windows.py); stages.py in which order

Source: DIRECTOR (§ IV to § VI).
"""
