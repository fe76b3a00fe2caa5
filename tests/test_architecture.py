"""The package is five rooms on a core, in one order: a room imports only those before it.

Inside a room modules import one another in any order, but never in a circle.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import phasor

FOLDER = Path(phasor.__file__).parent
# the text of every file of the package, by its path; tests plant lines in a copy of this
Files = dict[str, str]
_PATHS = (*FOLDER.rglob("*.py"), *FOLDER.rglob("*.pyi"))
SRC: Files = {path.relative_to(FOLDER).as_posix(): path.read_text("utf-8") for path in _PATHS}

# "phasor" is the package itself, which offers what stands before it; all other modules are the core
ROOMS = (
    "core",
    "files",
    "identification",
    "extending",
    "testing",
    "phasor",
    "papers",
    "charts",
    "torch",
    "jax",
    "mlx",
    "cli",
)
# the demonstration drives phasor.torch; only its command imports it.
# files.checkpoint.programs imports it when a file of torch.save is read; _native is the stub of the
# kernel
USE_TORCH = ("torch", "files.checkpoint.programs", "cli.demo", "_native")
MOST_LINES = 500


def modules(src: Files) -> dict[str, str]:
    """The file of every module of the package ``src``, by its name within the package."""
    stems = {path: path.rpartition(".")[0] for path in src}
    names = {path: stem.removesuffix("__init__").strip("/") for path, stem in stems.items()}
    return {name.replace("/", ".") or "phasor": path for path, name in names.items()}


@functools.cache  # by text: a copy of the package has nearly the same files
def imported(text: str, package: tuple[str, ...]) -> list[tuple[str, ...]]:
    """All that a file imports, wherever in it: dotted names, the imported one included."""
    found: list[tuple[str, ...]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            origin = (*above, *(node.module.split(".") if node.module else ()))
            found += [(*origin, alias.name) for alias in node.names]
    return found


def uses(src: Files) -> Iterator[tuple[str, str]]:
    """Pairs of a module and a module of the package, or of torch, that it imports."""
    known = modules(src)
    for name, path in known.items():
        inside = () if name == "phasor" else tuple(name.split("."))
        package = ("phasor", *(inside if path.endswith("__init__.py") else inside[:-1]))
        for target in imported(src[path], package):
            if target[0] == "torch":
                yield name, "<torch>"
            if target[0] == "phasor":
                # the longest part of the name that is a module; the rest are names in it
                ends = range(len(target), 1, -1)
                found = [".".join(target[1:end]) for end in ends]
                yield name, next((one for one in found if one in known), "phasor")


def room_of(module: str) -> str:
    """The room that a module is in."""
    first = module.partition(".")[0]
    return "cli" if first == "__main__" else first if first in ROOMS else "core"


def back_edges(src: Files) -> set[tuple[str, str]]:
    """Imports of a room that stands after the importer's, and those that close a circle."""
    edges = {edge for edge in uses(src) if edge[1] != "<torch>"}
    imports: dict[str, set[str]] = {}
    for name, target in edges:
        imports.setdefault(name, set()).add(target)

    @functools.cache
    def reached(module: str) -> frozenset[str]:
        """All that a module imports, and what these import, inside its room."""
        seen, todo = set[str](), [module]
        while todo:
            new = {t for t in imports.get(todo.pop(), ()) if room_of(t) == room_of(module)} - seen
            seen |= new
            todo += new
        return frozenset(seen)

    return {
        (name, target)
        for name, target in edges
        if ROOMS.index(room_of(target)) > ROOMS.index(room_of(name)) or name in reached(target)
    }


def strays_to_torch(src: Files) -> set[str]:
    """Modules that import torch and may not."""
    return {
        name
        for name, target in uses(src)
        if target == "<torch>" and not f"{name}.".startswith(tuple(f"{one}." for one in USE_TORCH))
    }


def planted(name: str, line: str, src: Files = SRC) -> Files:
    """The package with ``line`` at the end of a module."""
    path = modules(src)[name]
    return src | {path: f"{src[path]}\n\n{line}\n"}


def test_imports_point_one_way() -> None:
    """Also inside functions and under TYPE_CHECKING."""
    assert back_edges(SRC) == set()


def test_the_walk_sees_the_imports_there_are() -> None:
    """Edges of every form, so that an empty answer above means something."""
    seen = set(uses(SRC))
    assert {
        ("_checks", "errors"),
        ("scaling", "scaling.laws"),
        ("scaling.rules", "scaling.laws"),
        ("angles", "rope"),
        ("phasor", "rope"),
        ("torch._operator.ops", "torch._operator.eager"),
        ("torch._operator.eager", "<torch>"),
    } <= seen


@pytest.mark.parametrize(
    ("name", "line", "edge"),
    [
        ("errors", "from phasor.numpy import rotate", "numpy"),
        ("errors", "import phasor.numpy", "numpy"),
        ("errors", "from phasor import numpy", "numpy"),
        ("errors", "from . import numpy", "numpy"),
        ("errors", "from .numpy import matrix", "numpy"),
        ("rope", "def late():\n    from phasor.angles import cos_sin", "angles"),
        ("axes", "if TYPE_CHECKING:\n    from phasor.rope import Rope", "rope"),
        ("angles", "from phasor import Rope", "phasor"),
        ("scaling.laws", "from phasor.scaling import Linear", "scaling"),
        ("scaling.laws", "from .rules import LongRope", "scaling.rules"),
        ("scaling.laws", "from ..rope import Rope", "rope"),
        ("numpy", "def late():\n    import phasor.torch.functional", "torch.functional"),
        ("rope", "from phasor.rope import Rope", "rope"),
    ],
    ids=lambda value: str(value).replace("\n", " "),
)
def test_a_planted_back_edge_is_found(name: str, line: str, edge: str) -> None:
    """In every form in which Python can write an import."""
    assert (name, edge) in back_edges(planted(name, line))


def test_a_new_module_needs_no_place_but_may_close_no_circle() -> None:
    """A leaf is free to import what its room may; what imports it may not be among that."""
    more = SRC | {"shortcuts.py": "from phasor.rope import Rope\n"}
    assert back_edges(more) == set()
    circle = planted("rope", "from phasor import shortcuts", more)
    assert back_edges(circle) == {("shortcuts", "rope"), ("rope", "shortcuts")}


def test_only_the_torch_package_imports_torch() -> None:
    """The NumPy core runs where there is no torch."""
    assert strays_to_torch(SRC) == set()


@pytest.mark.parametrize(
    "line", ["import torch", "import torch.nn as nn", "def late():\n    from torch import Tensor"]
)
def test_a_planted_import_of_torch_is_found(line: str) -> None:
    """Late ones too."""
    assert strays_to_torch(planted("angles", line)) == {"angles"}


@functools.cache
def prints(text: str) -> bool:
    """Whether a file calls what prints."""
    calls = ("print", "click.echo", "click.secho", "Console")
    return any(name in text for name in calls) and any(
        isinstance(node, ast.Call) and ast.unparse(node.func) in calls
        for node in ast.walk(ast.parse(text))
    )


def printers(src: Files) -> set[str]:
    """Modules that print by themselves."""
    return {name for name, path in modules(src).items() if prints(src[path])}


def test_what_is_printed_goes_one_way() -> None:
    """There it is made visible. The help is click's, and `patch` names classes of Python."""
    assert printers(SRC) == {"cli", "cli.output", "torch.live"}


@pytest.mark.parametrize("line", ["print(1)", "click.echo(1)", "Console().rule()"])
def test_a_planted_print_is_found(line: str) -> None:
    """By whichever way."""
    assert "describe" in printers(planted("describe", line))


def test_no_file_is_long() -> None:
    """What does not fit is two things."""
    lengths = {path: len(text.splitlines()) for path, text in SRC.items()}
    assert {name: n for name, n in lengths.items() if n > MOST_LINES} == {}


def test_what_the_package_exports_is_what_it_names() -> None:
    """`__all__` is every public name of phasor that is not a module of it."""
    own = {name.split(".")[0] for name in modules(SRC)}
    assert all(hasattr(phasor, name) for name in phasor.__all__)  # some are imported only now
    public = {
        name
        for name, value in vars(phasor).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("phasor")
    }
    assert public - own <= set(phasor.__all__)
    assert set(phasor.__all__) - public <= own  # a function may be named like its module
    assert set(phasor.__all__) <= set(dir(phasor))
    assert list(phasor.__all__) == sorted(phasor.__all__, key=export_order)
    with pytest.raises(AttributeError, match="no attribute 'Ropes'"):
        _ = phasor.Ropes  # pyright: ignore[reportAttributeAccessIssue]


def export_order(name: str) -> tuple[int, str]:
    """Constants, classes, functions, as ruff sorts them."""
    kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return kind, name


def hidden_modules(src: Files) -> set[str]:
    """Modules whose package has something else of the same name: no dotted path reaches them."""
    known = modules(src)
    return {
        f"{package}.{alias.name}".removeprefix("phasor.")
        for package, path in known.items()
        if path.endswith("__init__.py")
        for node in ast.walk(ast.parse(src[path]))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if f"{package}.{alias.name}".removeprefix("phasor.") in known
        and not f"phasor.{package}".removesuffix(".phasor").endswith(node.module or "")
    }


def test_no_module_hides_behind_a_name_of_its_package() -> None:
    """``phasor.papers.decay`` would be the function, and the file of that name out of reach."""
    assert hidden_modules(SRC) == set()
    spoilt = planted("papers", "from phasor.papers.distances import bounds")
    assert hidden_modules(spoilt) == {"papers.bounds"}
