"""``phasor diff``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import click

from phasor.cli.identify import calling_options, find_function, is_function, read_calling
from phasor.cli.options import HEAD_DIM, read_model, seq_len_option, takes_models, tokens_option
from phasor.cli.output import Screen, exit_with, print_json
from phasor.describe import static_rope
from phasor.errors import SpecError
from phasor.identification import diff as diff_rotations
from phasor.rope import Rope

_CONTEXT = 4096  # positions at which functions are compared


@click.command(epilog="Example: phasor diff llama-3-8b llama-3.1-8b")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 2, min_open=True),
    help="Largest distance of rotated unit vectors; by default 1e-06, or 0.001 for functions.",
)
@tokens_option("--context", "Positions to compare; by default the longer of the two contexts.")
@click.option("--head-dim", type=HEAD_DIM, help="Width of a head, for two functions.")
@click.option("--kind", metavar="NAME", help="Kind of layers to compare a function with.")
@calling_options
@seq_len_option
@takes_models("first", "second")
def diff(
    first: str,
    second: str,
    as_json: bool,
    tolerance: float | None,
    context: int | None,
    head_dim: int | None,
    kind: str | None,
    seq_len: int | None,
    table: str | None,
    takes: str | None,
    dims: str | None,
    arrays: str | None,
    dtype: str | None,
    n_axes: int | None,
    **load_options: Any,
) -> None:
    """Show where two rotations differ: first pair, first position. Exits with 1 if they do.

    FIRST and SECOND are models, or functions (package.module:function or file.py:function).
    """
    if first == second == "-":
        raise click.UsageError(
            "standard input can be read only once: pass one of the two as a file."
        )
    calling = {"table": table, "takes": takes, "dims": dims, "arrays": arrays, "dtype": dtype,
               "n_axes": n_axes}  # fmt: skip
    if is_function(first) or is_function(second):
        with redirect_stdout(sys.stderr):  # output of the functions' own code
            rotations = [
                _find_rotation(side, kind, seq_len, **load_options) for side in (first, second)
            ]
            difference = diff_rotations(
                *rotations, head_dim=head_dim, context=context or _CONTEXT, tolerance=tolerance,
                **read_calling(calling),
            )  # fmt: skip
        if as_json:
            plain = None if difference is None else difference.as_plain()
            print_json({"differ": difference is not None, "difference": plain})
        else:
            compared = f"positions 0 to {(context or _CONTEXT) - 1}"
            text = str(difference or f"They agree wherever they were compared, {compared}.")
            Screen().print_lines(text.splitlines())
        raise click.exceptions.Exit(0 if difference is None else 1)
    for option, value in (calling | {"head_dim": head_dim, "kind": kind}).items():
        if value is not None:
            option = "--axes" if option == "n_axes" else f"--{option.replace('_', '-')}"
            raise click.UsageError(f"{option} is for functions; models define it themselves.")
    a, b = (read_model(model, **load_options) for model in (first, second))
    difference = diff_rotations(a, b, seq_len=seq_len, context=context, tolerance=tolerance)
    exit_with(difference, as_json=as_json)


def _find_rotation(
    text: str, kind: str | None, seq_len: int | None, **load_options: Any
) -> Rope | Callable[..., Any]:
    """The function that ``text`` names, or the rope of a model to compare a function with."""
    if is_function(text):
        return find_function(text)
    ropes = read_model(text, **load_options)
    rotating = {name: rope for name, rope in ropes.kinds.items() if rope is not None}
    rotating |= {rotation.name: rotation.rope for rotation in ropes.auxiliary_ropes}
    name = next(iter(rotating)) if kind is None and len(rotating) == 1 else kind
    if name is None or name not in rotating:
        raise SpecError(
            f"kind must be one of {', '.join(map(repr, rotating))} to compare {ropes.name} with a "
            f"function, got {kind!r}: pass --kind"
        )
    return static_rope(rotating[name], seq_len or ropes.context)
