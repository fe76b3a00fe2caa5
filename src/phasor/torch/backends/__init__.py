"""The three implementations of the one operator; none of them imports another."""
