"""The one operator, its three implementations, and the checks before it."""
