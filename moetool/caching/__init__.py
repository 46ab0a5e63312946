"""Cache policies, one per file with the policy's name; `_*.py` hold their contract and residency."""
