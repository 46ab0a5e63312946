"""The files of other programs, one format a file; the file's name is the format's.

Formats of plans have `write_plan`; what formats of routes and counts may have is in `moetool.formats._routes`.
"""
