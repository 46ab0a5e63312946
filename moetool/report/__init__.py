"""Pages of traces, placements and plans: measures and figures of `moetool report`."""
