"""Pages of traces, placements and plans: measures, figures and findings of `moetool report`."""
