"""moetool: capture the routing of Mixture-of-Experts models, predict it, plan by it, serve by the plan."""

__version__ = "0.1.0"
