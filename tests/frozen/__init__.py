"""Hashes of what moetool computes, made before a change and compared after it (`CONTRIBUTING.md`).

    python -m tests.frozen make build/frozen.json       record every case
    python -m tests.frozen compare build/frozen.json    run them again; 1 if one has changed

`cases.py` lists the cases, `runs.py` is the only module that knows moetool, `record.py` holds and compares hashes.
"""
