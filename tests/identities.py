"""Keys and certificates of a made-up cluster."""

import functools

from moetool.cluster.certificates import Authority, Identity

NOBODY = Identity(name="", certificate="", key="", authority="")
"""For settings that no connection is made with."""


@functools.cache
def authority() -> Authority:
    """The cluster's authority, the same for all tests of a process."""
    return Authority.new()


@functools.cache
def identity(name: str) -> Identity:
    """A process of the cluster."""
    return authority().issue(name)
