"""Cache policies, one per file and named like it; `_*.py` hold their contract and residency."""
