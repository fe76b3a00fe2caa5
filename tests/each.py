"""Cases of a test that take less time than pytest takes to start one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any


def each(names: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As ``pytest.mark.parametrize``, but in one test; the case that fails is told in a note.

    >>> @each("a, b", [(1, 1), (2, 3)])
    ... def test(a, b):
    ...     print(a, b)
    ...     assert a == b
    >>> try:
    ...     test()
    ... except AssertionError as error:
    ...     print(*error.__notes__)
    1 1
    2 3
    the case: {'a': 2, 'b': 3}
    """
    keys, every = [name.strip() for name in names.split(",")], list(cases)

    def one_test(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run(**others: Any) -> None:
            for case in every:
                given = dict(zip(keys, case if len(keys) > 1 else (case,), strict=True))
                try:
                    test(**given, **others)
                except BaseException as error:
                    error.add_note(f"the case: {given}")
                    raise

        signature = inspect.signature(test)
        rest = [p for name, p in signature.parameters.items() if name not in keys]
        run.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return run

    return one_test
