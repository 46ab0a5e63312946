"""The trace: schema, reader, writer, checks, editing and merging."""
