"""Longer contexts: the laws that reach one, what each does to the phases and to the cosines."""
