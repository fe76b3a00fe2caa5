"""The command line: ``phasor show``, ``diff``, ``presets``, ``demo`` and ``bench``."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import click

from phasor.configs import load
from phasor.describe import as_plain
from phasor.errors import BackendError, PhasorError, SpecError
from phasor.layers import LayerRopes
from phasor.presets import preset, preset_names


def run() -> None:
    """The program: exit code 0, 1 for "they differ" or "it fell short", 2 for bad input."""
    try:
        sys.exit(main.main(prog_name="phasor", standalone_mode=False))
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        _refuse(error.format_message())
    except PhasorError as error:
        _refuse(str(error))
    except BrokenPipeError:
        # the reader of a pipe has gone; Python would complain again when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _refuse(message: str) -> NoReturn:
    click.echo("phasor: " + " ".join(message.split()), err=True)
    sys.exit(2)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="phasor")
def main() -> None:
    """Rotary position embeddings (RoPE): what a model's is, and where two differ.

    A MODEL is the name of a preset (`phasor presets` lists them), or the path of a config.json,
    params.json, or a folder that holds one.
    """


_at = click.option(
    "--at",
    "seq_len",
    type=click.IntRange(1),
    metavar="TOKENS",
    help="Sequence length at which a rule (dynamic NTK, LongRoPE) picks its law.",
)


@main.command()
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Everything, as JSON.")
@click.option("--pairs", is_flag=True, help="All pairs, not a selection.")
@click.option(
    "--context", type=click.IntRange(1), metavar="TOKENS", help="Count turns over this length."
)
@_at
def show(model: str, as_json: bool, pairs: bool, context: int | None, seq_len: int | None) -> None:
    """Say which rotation MODEL means, in words and as a table of pairs."""
    ropes = _read(model)
    length = context or ropes.context
    if as_json:
        click.echo(json.dumps(as_plain(ropes, seq_len or length, length), indent=2))
        return
    from phasor.terminal import print_model

    print_model(ropes, seq_len or length, length, every_pair=pairs)


@main.command()
@click.argument("first")
@click.argument("second")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 2, min_open=True),
    default=1e-6,
    show_default=True,
    help="How far apart two unit vectors may be.",
)
@click.option(
    "--context",
    type=click.IntRange(1),
    metavar="TOKENS",
    help="Positions to compare; the longer of the two models' contexts unless given.",
)
@_at
def diff(
    first: str,
    second: str,
    as_json: bool,
    tolerance: float,
    context: int | None,
    seq_len: int | None,
) -> None:
    """Show where two models' rotations part: first pair, first position. Exit code 1 if they do."""
    from phasor.comparison import compare

    a, b = _read(first), _read(second)
    known = [ropes.context for ropes in (a, b) if ropes.context]
    length = context or max(known, default=1 << 20)
    compared = compare(a, b, seq_len or length, length, tolerance)
    if as_json:
        click.echo(json.dumps(compared.as_plain(), indent=2))
    else:
        from phasor.terminal import print_comparison

        print_comparison(compared)
    sys.exit(1 if compared.differ else 0)


@main.command()
def presets() -> None:
    """List the presets."""
    for name in preset_names():
        click.echo(name)


@main.command()
def demo() -> None:
    """Read a real model's configuration, rotate its queries and keys, and prove the result."""
    _need_torch("the demo")
    from phasor.demo import run

    sys.exit(0 if run() else 1)


@main.command()
@click.option(
    "--save",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PICTURE",
    help="Draw the result as well.",
)
def bench(save: Path | None) -> None:
    """Measure this machine for a minute: phasor against a copy and against plain torch."""
    _need_torch("the benchmark")
    from phasor.bench import run

    run(save)


def _need_torch(what: str) -> None:
    if find_spec("torch") is None:
        raise BackendError(
            f"{what} rotates with PyTorch, which is not installed: pip install 'phasor[torch]'"
        )


def _read(model: str) -> LayerRopes:
    """The model that a preset's name or a path stands for."""
    is_path = Path(model).exists() or "/" in model or model.endswith(".json")
    if is_path and model not in preset_names():
        return load(model)
    try:
        return preset(model)
    except SpecError as error:
        raise SpecError(
            f"no file or folder is called {model!r}, and as a preset: {error}"
        ) from None
