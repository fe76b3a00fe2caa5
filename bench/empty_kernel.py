"""A kernel that does nothing: what a launch costs by itself. Only for machines with Triton."""

from __future__ import annotations

import triton


@triton.jit
def nothing(x):
    """Return at once."""
