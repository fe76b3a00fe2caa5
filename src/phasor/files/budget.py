"""How much a file may hold: one budget for every reader, asked before anything is made of it.

A small file can stand for far more than it holds: lists that are multiplied, variables that are
filled in, arrays that are compressed or whose lengths are lies.
"""

from __future__ import annotations

#: Bytes of a config, and characters of a text after its variables are filled in.
MOST_TEXT = 16 * 2**20
#: Values in a file. A vocabulary of 262,144 tokens is 1.3 million, with scores, types and merges.
MOST_ELEMENTS = 2**21
