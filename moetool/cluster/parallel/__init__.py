"""Expert parallelism: ranks in lockstep, experts by plan, all-to-all between them, placed anew for what is queued.

    opening.py    a placement plan and options to a head; launching.py its ranks as processes
    head.py       one OpenAI engine: static batches of its queue (requests.py); members.py which ranks are there, by
                  generation
    placing.py    decides beside serving what the next placement is; control.py how; stages.py in which order it comes
    rank.py       one rank: its batch, its experts, step by step with the others
    dispatch.py   an MoE layer over the ranks; group.py the collectives; routing.py who computes for whom
    migration.py  experts on their way, in compute phases only (windows.py), to a rank's shelf.py

Source: DIRECTOR (§ IV to § VI).
"""
