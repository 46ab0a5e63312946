"""Keys and certificates of a test cluster."""

import functools

from moetool.cluster.certificates import Authority, Identity

NOBODY = Identity(name="", certificate="", key="", authority="")
"""For settings without a connection."""


@functools.cache
def authority() -> Authority:
    """The cluster's authority, one per test process."""
    return Authority.new()


@functools.cache
def identity(name: str) -> Identity:
    """Identity of a process of the cluster."""
    return authority().issue(name)
