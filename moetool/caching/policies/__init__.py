"""Cache policies, one per file with the policy's name."""
