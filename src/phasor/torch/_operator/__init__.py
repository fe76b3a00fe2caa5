"""The operators, the three implementations of each, and the checks of their arguments."""
