"""The trace: its schema, and what reads, writes, joins, parts and translates it."""
