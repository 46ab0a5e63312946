"""Routing of a running model, recorded: gate logs, routes of requests, comparison with other policies."""
