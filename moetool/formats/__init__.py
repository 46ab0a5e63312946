"""The files of other programs, one format a file; the file's name is the format's.

Formats of plans have `write_plan`; `moetool.formats._routes` lists the functions of formats of routes and counts.
"""
