"""Edge servers with a task each: placements, and single machines, against each other under the same arrivals."""
