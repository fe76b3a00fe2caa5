"""``phasor identify``: which rotation is this function?"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from phasor.cli.options import HEAD_DIM
from phasor.cli.output import Screen, print_json
from phasor.errors import SpecError
from phasor.identification import identify as identify_function

_NO_ROPE = 3  # the exit status if no Rope does what the function does


def is_function(text: str) -> bool:
    """Whether ``text`` names a function, as ``package.module:function`` or ``file.py:function``."""
    module, colon, name = text.rpartition(":")
    names = name.split(".") if module.endswith(".py") else [*module.split("."), *name.split(".")]
    return bool(colon) and all(part.isidentifier() for part in names)


def find_function(text: str) -> Callable[..., Any]:
    """The callable that ``text`` names; its module may be in the current folder."""
    module, _, names = text.rpartition(":")
    if not is_function(text):
        raise SpecError(
            f"a function must be given as package.module:function or file.py:function, got {text!r}"
        )
    target: Any = _import(module)
    for name in names.split("."):
        if not hasattr(target, name):
            raise SpecError(f"{text!r}: there is no {name!r} in {target!r}")
        target = getattr(target, name)
    if isinstance(target, type):
        name = target.__name__
        raise SpecError(
            f"{text!r} must be a function or an nn.Module instance, but is a class: write `rotary "
            f"= {name}(...)` in a file, and pass file.py:rotary"
        )
    if not callable(target):
        raise SpecError(f"{text!r} must be a function or an nn.Module instance, got {target!r}")
    return target


def _import(module: str) -> Any:
    """The module of a dotted name, or of a file whose name ends in ``.py``."""
    is_file = module.endswith(".py")
    if is_file and not Path(module).is_file():
        raise SpecError(f"{module} is not a file; pass file.py:function or package.module:function")
    # Python does the same for a script and for `python -m`
    folder = str(Path(module).resolve().parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return _run_file(Path(module).resolve()) if is_file else import_module(module)
    except ImportError as error:
        raise SpecError(f"{module!r} cannot be imported: {error}") from None
    except (Exception, SystemExit) as error:  # importing runs its code
        description = f"{type(error).__name__}: {error}"
        raise SpecError(f"{module!r} cannot be imported, it raises {description}") from None


def _run_file(path: Path) -> ModuleType:
    """The module of a file, under a name that no module of another folder has."""
    name = f"{path.stem} of {path.parent}"
    if name not in sys.modules:
        spec = spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError("Python has no way to read it")
        # pickle and inspect look modules up there
        module = sys.modules[name] = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def calling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options for how to call a function, passed as ``**calling``."""
    options = [
        click.option(
            "--table",
            metavar="FUNCTION",
            help="A function that computes cos and sin from positions.",
        ),
        click.option("--takes", metavar="WORDS", help='The arguments, such as "q k positions".'),
        click.option("--dims", metavar="LETTERS", help="Order of dimensions, such as bhsd."),
        click.option(
            "--arrays", type=click.Choice(["numpy", "torch", "jax"]), help="Library of the arrays."
        ),
        click.option("--dtype", help="Dtype of the vectors; float32 by default."),
        click.option(
            "--axes",
            "n_axes",
            type=click.IntRange(1),
            help="Number of position axes; 1 by default.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def read_calling(calling: dict[str, Any]) -> dict[str, Any]:
    """The `calling_options` that were given, with ``table`` as the object it names."""
    given = {name: value for name, value in calling.items() if value is not None}
    if "table" in given:
        given["table"] = find_function(given["table"])
    return given


@click.command(epilog="Example: phasor identify model:rotate --head-dim 128")
@click.argument("function")
@click.option("--head-dim", type=HEAD_DIM, required=True, help="Width of a head.")
@calling_options
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def identify(function: str, head_dim: int, as_json: bool, **calling: Any) -> None:
    """Find the Rope that FUNCTION applies, and its errors.

    FUNCTION is package.module:function or file.py:function. Exits with 3 if no Rope does the same.
    """
    with redirect_stdout(sys.stderr):  # the function's own output
        identified = identify_function(find_function(function), head_dim, **read_calling(calling))
    if as_json:
        print_json(identified.as_plain())
    else:
        Screen().print_lines(str(identified).split("\n"))
    if identified.rope is None:
        raise click.exceptions.Exit(_NO_ROPE)
