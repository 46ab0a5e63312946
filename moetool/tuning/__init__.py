"""Choice of serving settings for one machine: replay, measured costs, cache plans, and their frontier."""
