"""``phasor convert``: a checkpoint in the other pairing, or in another program's format."""

from __future__ import annotations

from pathlib import Path

import click

from phasor.cli.options import left_aside_warnings, like_option, strict_option
from phasor.cli.output import Screen, progress_bar
from phasor.files.checkpoint import (
    FLOAT_TYPES,
    PROGRAMS,
    ConversionPlan,
    FloatType,
    Patterns,
    Program,
    plan_conversion,
    write,
)
from phasor.pairings import PAIRINGS, Pairing, opposite
from phasor.rope import Rope

_PAIRING = click.Choice(PAIRINGS)
_REGEX = "REGEX"


@click.command(epilog="Example: phasor convert llama llama-interleaved --to interleaved --verify")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path), required=False)
@click.option("--to", "target", type=_PAIRING, help="The pairing of the result.")
@click.option(
    "--for",
    "program",
    type=click.Choice(PROGRAMS),
    help="Instead of --to: the program to convert a Llama or a GGUF file for.",
)
@click.option(
    "--dtype",
    type=click.Choice(FLOAT_TYPES),
    help="The float type of a GGUF file's tensors for transformers.",
)
@click.option(
    "--from",
    "origin",
    type=_PAIRING,
    help="The pairing of SOURCE, if its config states the wrong one.",
)
@click.option(
    "--config", type=click.Path(allow_dash=True), metavar="PATH", help="The model's config."
)
@click.option("--head-dim", type=click.IntRange(2), help="Width of a head, instead of a config.")
@click.option(
    "--rotary-dim", type=click.IntRange(2), help="With --head-dim: number of rotated coordinates."
)
@click.option(
    "--rotary-start", type=click.IntRange(0), help="With --head-dim: first rotated coordinate."
)
@click.option("--query", multiple=True, metavar=_REGEX, help="Names of query projections.")
@click.option("--key", multiple=True, metavar=_REGEX, help="Names of key projections.")
@click.option(
    "--qkv-blocks",
    "blocks",
    multiple=True,
    metavar=_REGEX,
    help="Fused projections, [all q | all k | all v].",
)
@click.option(
    "--qkv-groups",
    "groups",
    multiple=True,
    metavar=_REGEX,
    help="Fused projections, [q.. k v] per key head.",
)
@click.option("--vectors", multiple=True, metavar=_REGEX, help="QK-norm scales or cached keys.")
@click.option("--dry-run", is_flag=True, help="Print what would change, and write nothing.")
@like_option
@strict_option
@click.option("--verify", "verified", is_flag=True, help="Read both sides again and compare them.")
def convert(
    source: Path,
    out: Path | None,
    target: Pairing | None,
    program: Program | None,
    dtype: FloatType | None,
    origin: Pairing | None,
    config: str | None,
    head_dim: int | None,
    rotary_dim: int | None,
    rotary_start: int | None,
    dry_run: bool,
    like: str | None,
    strict: bool,
    verified: bool,
    **regexes: tuple[str, ...],
) -> None:
    """Write a checkpoint with queries and keys in the other pairing.

    SOURCE is a safetensors or GGUF file, or a folder with one safetensors file or with shards and
    their index. OUT gets the same layout and must not exist. The config next to SOURCE
    determines which tensors change, or patterns do: regular expressions that match whole names.

    Quantised weights move with their scales and are not rounded again. The
    conversion moves columns in GPTQ and AWQ checkpoints, rows in MLX, compressed-tensors and 8-bit
    bitsandbytes checkpoints, and rows of blocks in GGUF files of any quantisation.

    With --for, SOURCE is a Llama folder, and names and config are converted too: Meta's params.json
    and consolidated.*.pth become a folder for transformers, or the reverse. A GGUF file of a Llama,
    Qwen 2 or Qwen 3 becomes a folder for transformers, dequantised to --dtype.
    """
    if out is None and not dry_run:
        raise click.UsageError("Missing argument 'OUT'; only --dry-run works without it.")
    if dry_run and verified:
        raise click.UsageError(
            "--verify has nothing to read after --dry-run; use only one of them."
        )
    goal = target or program
    if goal is None or (target is not None and program is not None):
        raise click.UsageError("Use either --to or --for.")
    rope = None
    if head_dim is not None:
        if config is not None:
            raise click.UsageError("--head-dim replaces --config; use only one of them.")
        start = rotary_start or 0
        rope = Rope(
            head_dim=head_dim,
            pairing=origin or opposite(target or "half"),
            rotary_dim=head_dim - start if rotary_dim is None else rotary_dim,
            rotary_start=start,
        )
    elif rotary_dim is not None or rotary_start is not None:
        raise click.UsageError("--rotary-dim and --rotary-start need --head-dim.")
    patterns = Patterns(**regexes)
    with left_aside_warnings():
        conversion = plan_conversion(
            source,
            goal,
            source=origin,
            model=config if rope is None else rope,
            patterns=patterns if patterns.list_patterns() else None,
            like=like,
            strict=strict,
            dtype=dtype,
        )
    if out is not None and not dry_run:
        _write(conversion, out, verified=verified)
    screen = Screen()
    screen.print_lines(conversion.lines())
    left_out = " Other files than weights were not copied." if source.is_dir() else ""
    files = f"Written to {out}.{left_out}"
    if program is not None:
        files = f"Written to {out}: {' and '.join((*conversion.other_files, *conversion.files))}."
    if verified:
        screen.print_line("Verified: both sides agree, byte for byte and in their scores.")
    screen.print_line("Nothing was written." if out is None or dry_run else files)


def _write(conversion: ConversionPlan, out: Path, *, verified: bool) -> None:
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn

    total, done = conversion.size * (2 if verified else 1), 0
    with progress_bar("", BarColumn(), DownloadColumn(), TimeRemainingColumn()) as update:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            update(done, total)

        write(conversion, out, verified=verified, advance=advance)
