"""The command line: ``phasor show``, ``diff``, ``extend``, ``identify``, and the rest."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import platform
import sys
from collections.abc import Generator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import click

from phasor._checks import did_you_mean
from phasor.cli.output import Screen, print_json, print_warning, warnings_to
from phasor.errors import DISTRIBUTION, PhasorError, VerificationError, visible

# packages that phasor uses or supports, for --version --verbose
_PACKAGES = (
    *("numpy", "click", "rich", "torch", "triton", "transformers", "jax", "mlx"),
    *("onnx", "onnxscript", "onnxruntime", "safetensors", "gguf", "altair"),
)
_EXIT_DIFFERENCE, _EXIT_ERROR, _EXIT_INTERRUPTED, _EXIT_PIPE_CLOSED = 1, 2, 130, 141


def run() -> None:
    """Run the command line and exit; the docs' page on the command line lists the exit statuses."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # a stream that the parent process closed
            setattr(sys, name, io.TextIOWrapper(io.BytesIO()))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # escape characters that the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    # with --json, errors are a JSON object on stdout too
    as_json = "--json" in itertools.takewhile(lambda word: word != "--", sys.argv[1:])
    warned: list[str] = []
    with warnings_to(warned.append if as_json else print_warning):
        status, error = _run_command()
    with contextlib.suppress(OSError):
        if error is None or not (as_json and _print_refusal(error, warned)):
            _print_messages(error, warned)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # otherwise Python flushes again at exit and prints an error
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(status)


def _print_refusal(error: str, warned: list[str]) -> bool:
    """Print an error as JSON on stdout; False if that cannot be written."""
    try:
        print_json({"error": visible(error), "warnings": warned})
        sys.stdout.flush()
    except OSError:
        return False
    return True


def _print_messages(error: str | None, warned: list[str]) -> None:
    """Print deferred warnings and an error as lines on stderr."""
    for message in warned:
        print_warning(message)
    if error is not None:
        Screen(stderr=True).print_line(f"phasor: {error}")


def _run_command() -> tuple[int, str | None]:
    """Run the command in ``sys.argv``; return its exit status and an error message, if any."""
    try:
        return main.main(prog_name="phasor", standalone_mode=False) or 0, None
    except (click.exceptions.Abort, KeyboardInterrupt):
        return _EXIT_INTERRUPTED, None
    except click.ClickException as error:
        message = error.format_message()
        if isinstance(error, click.UsageError) and error.ctx is not None and error.ctx.parent:
            message += f" `{error.ctx.command_path} --help` has an example."
        return _EXIT_ERROR, message
    except PhasorError as error:
        return _EXIT_DIFFERENCE if isinstance(error, VerificationError) else _EXIT_ERROR, str(error)
    except MemoryError:
        return _EXIT_ERROR, "not enough memory"
    except OSError as error:
        location = f"{error.filename}: " if error.filename else ""
        return _EXIT_ERROR, location + (error.strerror or str(error))


# one file per command, imported only when it runs: this halves the time of `show`
COMMANDS = (
    *("show", "diff", "identify", "verify", "convert", "translate"),
    *("extend", "report", "presets", "demo"),
)


class _Commands(click.Group):
    """A closed pipe gets its own exit status, because click's 1 means a difference in phasor."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        try:
            return getattr(import_module(f"phasor.cli.{cmd_name}"), cmd_name)
        except KeyboardInterrupt:  # click would print an empty line
            sys.exit(_EXIT_INTERRUPTED)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # click suggests only commands that are already imported
        word = args[0]
        if not (word in COMMANDS or word.startswith("-") or ctx.resilient_parsing):
            hint = did_you_mean(word, COMMANDS) or "`phasor --help` lists them all"
            ctx.fail(f"No such command {word!r}; {hint}")
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        with _exit_on_closed_pipe():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _exit_on_closed_pipe():
            return super().invoke(ctx)


@contextlib.contextmanager
def _exit_on_closed_pipe() -> Generator[None]:
    try:
        yield
    except BrokenPipeError:
        raise click.exceptions.Exit(_EXIT_PIPE_CLOSED) from None


@click.group(
    cls=_Commands,
    epilog="Example: phasor show llama-3.1-8b",
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
)
@click.option("--version", "show_version", is_flag=True, help="Show the version and exit.")
@click.option(
    "--verbose", is_flag=True, help="With --version, also show the machine and its packages."
)
@click.pass_context
def main(context: click.Context, show_version: bool, verbose: bool) -> None:
    """Rotary position embeddings (RoPE): inspect, compare and convert them.

    A MODEL is the name of a preset (`phasor presets` lists them), the id of a repository on the
    Hugging Face Hub, the path of a config.json, params.json, or a folder that holds one, or - for
    a config on standard input.
    """
    if show_version:
        click.echo("\n".join(version_lines(verbose=verbose)))
        context.exit()
    if verbose:
        raise click.UsageError("--verbose goes with --version")
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def version_lines(*, verbose: bool) -> list[str]:
    """The version; with ``verbose`` also the details for a bug report.

    >>> version_lines(verbose=True)[1].partition(" ")[0]
    'Python'
    """
    # imported above, it would take a fifth of the time of every command
    metadata = import_module("importlib.metadata")
    lines = [f"phasor, version {metadata.version(DISTRIBUTION)}"]
    if not verbose:
        return lines
    implementation = platform.python_implementation()
    lines.append(f"Python {platform.python_version()} ({implementation}) on {platform.platform()}")
    lines.append(f"CPU kernel: {'built' if find_spec('phasor._native') else 'not built'}")
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            lines.append(f"{package} {metadata.version(package)}")
    return lines
