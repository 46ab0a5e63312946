"""The trace: schema, reader, writer, checks, editing and merging.

formats/ has traces and counts of other programs, one format per file; foreign/ is what they share.
"""
