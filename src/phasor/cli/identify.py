"""``phasor identify``: which rotation is this function?"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from phasor.cli.options import HEAD_DIM
from phasor.cli.output import Screen, print_json
from phasor.errors import SpecError
from phasor.identification import identify as identify_function

_NO_ROPE = 3  # the exit status where no Rope does what the function does


def is_function(text: str) -> bool:
    """Whether ``text`` names a function, as ``package.module:function`` or ``file.py:function``."""
    module, colon, name = text.rpartition(":")
    names = name.split(".") if module.endswith(".py") else [*module.split("."), *name.split(".")]
    return bool(colon) and all(part.isidentifier() for part in names)


def find_function(text: str) -> Callable[..., Any]:
    """The callable that ``text`` names; the current folder is searched for its module too."""
    module, _, names = text.rpartition(":")
    if not is_function(text):
        raise SpecError(
            f"a function is named as package.module:function or file.py:function, got {text!r}"
        )
    target: Any = _import(module)
    for name in names.split("."):
        if not hasattr(target, name):
            raise SpecError(f"{text!r}: there is no {name!r} in {target!r}")
        target = getattr(target, name)
    if isinstance(target, type):
        name = target.__name__
        raise SpecError(
            f"{text!r} must be a function or an instance of a module, and is a class: write "
            f"`rotary = {name}(...)` in a file, and give file.py:rotary"
        )
    if not callable(target):
        raise SpecError(f"{text!r} must be a function or an instance of a module, got {target!r}")
    return target


def _import(module: str) -> Any:
    """The module of a dotted name, or of a file whose name ends in ``.py``."""
    path = Path(module)
    is_file = module.endswith(".py")
    if is_file and not path.is_file():
        raise SpecError(f"{module} is no file; give file.py:function, or package.module:function")
    # as Python does for a script, and for `python -m`
    folder = str(path.resolve().parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return import_module(path.stem if is_file else module)
    except ImportError as error:
        raise SpecError(f"{module!r} cannot be imported: {error}") from None
    except (Exception, SystemExit) as error:  # importing runs its code
        description = f"{type(error).__name__}: {error}"
        raise SpecError(f"{module!r} cannot be imported, it raises {description}") from None


@click.command(epilog="Example: phasor identify model:rotate --head-dim 128")
@click.argument("function")
@click.option("--head-dim", type=HEAD_DIM, required=True, help="Width of a head.")
@click.option("--table", metavar="FUNCTION", help="Makes cos and sin from positions.")
@click.option("--takes", metavar="WORDS", help='The arguments, such as "q k positions".')
@click.option("--dims", metavar="LETTERS", help="Order of dimensions, such as bhsd.")
@click.option("--arrays", type=click.Choice(["numpy", "torch", "jax"]), help="Whose arrays.")
@click.option("--dtype", help="Of the vectors; float32 unless given.")
@click.option("--axes", "n_axes", type=click.IntRange(1), help="Position axes; 1 unless given.")
@click.option("--json", "as_json", is_flag=True, help="Everything, as JSON.")
def identify(function: str, as_json: bool, **options: Any) -> None:
    """Say which rotation FUNCTION does, and what is wrong with it.

    FUNCTION is package.module:function or file.py:function. Exits with 3 if no Rope does the same.
    """
    given_options = {name: value for name, value in options.items() if value is not None}
    with redirect_stdout(sys.stderr):  # output of the function's own code
        if "table" in given_options:
            given_options["table"] = find_function(given_options["table"])
        identified = identify_function(find_function(function), **given_options)
    if as_json:
        print_json(identified.as_plain())
    else:
        Screen().print_lines(str(identified).split("\n"))
    if identified.rope is None:
        sys.exit(_NO_ROPE)
