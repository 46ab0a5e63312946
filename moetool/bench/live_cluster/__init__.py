"""Edge servers with one task each: compare placements and single machines under the same arrivals."""
