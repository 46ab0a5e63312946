"""Cache policies, one a file named as the policy is; beside them (`_*.py`) their contract and residency."""
