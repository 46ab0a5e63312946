"""Cache policies, one a file: the file's name is the policy's. No I/O, no clock; see `moetool.policy.Policy`."""
