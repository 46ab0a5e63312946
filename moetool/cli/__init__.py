"""The command line: one module per group of commands, and the one error boundary."""
