"""Model checkpoints: configs, families, routers, expert forms and weight formats."""
