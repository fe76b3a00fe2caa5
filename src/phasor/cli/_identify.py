"""``phasor identify``: which rotation is this function?"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import click

from phasor.conventions import identify as identify_function
from phasor.errors import SpecError


def is_function(text: str) -> bool:
    """Whether ``text`` names a function, as ``package.module:function``, and no model."""
    module, colon, name = text.partition(":")
    names = [*module.split("."), *name.split(".")]
    return bool(colon) and all(part.isidentifier() for part in names)


def named(text: str) -> Callable[..., Any]:
    """The callable that ``package.module:function`` names; the current folder is searched too.

    Raises:
        SpecError: If there is none.
    """
    module, _, names = text.partition(":")
    if not is_function(text):
        raise SpecError(f"a function is named as package.module:function, got {text!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = import_module(module)
    except ImportError as error:
        raise SpecError(f"{module!r} cannot be imported: {error}") from None
    for name in names.split("."):
        if not hasattr(found, name):
            raise SpecError(f"{text!r}: there is no {name!r} in {found!r}")
        found = getattr(found, name)
    if isinstance(found, type) or not callable(found):
        what = cast(object, found)
        raise SpecError(f"{text!r} must be a function or a made module, got {what!r}")
    return found


@click.command()
@click.argument("function")
@click.option("--head-dim", type=click.IntRange(2), required=True, help="Width of a head.")
@click.option("--table", metavar="FUNCTION", help="Makes cos and sin from positions.")
@click.option("--takes", metavar="WORDS", help='The arguments, such as "q k positions".')
@click.option("--layout", metavar="LETTERS", help="Order of dimensions, such as bhsd.")
@click.option("--arrays", type=click.Choice(["numpy", "torch", "jax"]), help="Whose arrays.")
@click.option("--dtype", default="float32", show_default=True, help="Of the vectors.")
@click.option("--axes", "n_axes", type=click.IntRange(1), default=1, help="Position axes.")
@click.option("--json", "as_json", is_flag=True, help="Everything, as JSON.")
def identify(
    function: str,
    head_dim: int,
    table: str | None,
    takes: str | None,
    layout: str | None,
    arrays: str | None,
    dtype: str,
    n_axes: int,
    as_json: bool,
) -> None:
    """Say which rotation FUNCTION (package.module:function) does, and what is wrong with it."""
    found = identify_function(
        named(function),
        head_dim,
        table=None if table is None else named(table),
        takes=takes,
        layout=layout,
        arrays=arrays,
        dtype=dtype,
        n_axes=n_axes,
    )
    click.echo(json.dumps(found.as_plain(), indent=2) if as_json else found.explain())
