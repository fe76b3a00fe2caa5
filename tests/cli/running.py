"""The command line in this process, with streams of its own: what it prints and how it ends."""

from __future__ import annotations

import io
import os
import sys
from subprocess import CompletedProcess
from unittest import mock

from phasor.cli import run


def run_phasor(
    *arguments: object, stdin: bytes = b"", encoding: str = "utf-8", **environment: str
) -> CompletedProcess[str]:
    """Run ``phasor`` with these arguments, on streams in ``encoding`` that are no terminal."""
    typed = ["phasor", *map(str, arguments)]
    given = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2))
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "80", **environment}),
        mock.patch.multiple(sys, argv=typed, stdin=given, stdout=out, stderr=err),
    ):
        try:
            run()
        except SystemExit as leaving:
            status = leaving.code
        else:
            raise AssertionError("the program must end with a status")
        out.flush()
        err.flush()
    printed = (stream.buffer.getvalue().decode("utf-8") for stream in (out, err))
    return CompletedProcess(typed, status, *printed)
