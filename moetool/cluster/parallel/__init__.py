"""Expert parallelism: ranks in lockstep, experts by plan, all-to-all between them, placed anew for what is queued.

    opening.py    a placement plan and options to a head; launching.py its ranks as processes
    head.py       one OpenAI engine; batches.py its queue (requests.py) in static batches, dealt to the ranks by
                  seating.py; members.py which ranks are there, by generation
    placing.py    decides beside serving what the next placement is; control.py how, by what measuring.py knows of
                  costs; stages.py in which order it comes
    rank.py       one rank, run by options.py: the generations that it joins; lockstep.py its batches, step by step
    dispatch.py   an MoE layer over the ranks; group.py the collectives; routing.py who computes for whom
    migration.py  experts on their way, in compute phases only (windows.py), to a rank's shelf.py

Source: DIRECTOR (§ IV to § VI).
"""
