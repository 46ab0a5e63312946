"""The command line: one module a group of commands, and the one error boundary."""
