"""The files of other programs, one format per file with the format's name.

Formats of plans have `write_plan` or `write_cache_plan`; `moetool.formats._routes` lists the functions of formats of
routes and counts.
"""
