"""Limits on the contents of a file, shared by every reader and checked before anything is built.

A small file can expand to far more than it holds: multiplied lists, substituted variables,
compressed arrays, false lengths.
"""

from __future__ import annotations

#: Bytes of a config, and characters of a text after its variables are filled in.
MOST_TEXT = 16 * 2**20
#: Values in a file. A vocabulary of 262,144 tokens is 1.3 million, with scores, types and merges.
MOST_ELEMENTS = 2**21
