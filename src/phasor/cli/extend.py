"""``phasor extend``."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, NoReturn, cast

import click

from phasor.cli.options import context_option, read_model, takes_models, tokens_option
from phasor.cli.output import Screen, print_json, write_file
from phasor.errors import ConfigError, PhasorWarning, SpecError
from phasor.extending import ExtensionPlan, plan_extension
from phasor.files.configs.source import read_source
from phasor.files.reading import load
from phasor.layers import LayerRopes

# the columns in the table of laws that need an explanation
_COLUMNS = {
    "new phases": "pairs that show an angle not seen in training",
    "slowest": "turns of the slowest pair over the context",
    "C(r) < 0": "distance beyond which a matching key can score below a random one",
    "neighbours": "angle between adjacent tokens in the fastest pair (1 = unchanged)",
}


@click.command(epilog="Example: phasor extend qwen3-8b --to 128k")
@tokens_option("--to", "The longer context, such as 128k or 1M.", least=3, required=True)
@click.option(
    "--law", metavar="NAME", help="Print the keys of this law instead of the documented one."
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=NUMBER",
    help="A parameter of --law, such as beta_fast=16. Repeatable.",
)
@click.option(
    "--factors",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="For longrope: a JSON file with long_factor, a list of divisors, one per pair.",
)
@click.option("--kind", metavar="NAME", help="Kind of layers to extend, if the model has several.")
@click.option(
    "--write",
    "folder",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Write a changed copy of MODEL's config.json to this folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@context_option
@takes_models("model")
def extend(
    model: str,
    to: int,
    law: str | None,
    settings: tuple[str, ...],
    factors: Path | None,
    kind: str | None,
    folder: Path | None,
    as_json: bool,
    context: int | None,
    **load_options: Any,
) -> None:
    """Compare scaling laws for a longer context; write the config.

    The law that MODEL's release documents comes first; nothing else is recommended.
    """
    if settings and law is None:
        raise click.UsageError("--set changes a parameter of a law: name the law with --law.")
    ropes = read_model(model, **load_options)
    changed = dict(map(_parse_setting, settings))
    parameters = {law: changed} if law is not None and changed else None
    divisors = None if factors is None else _read_divisors(factors)
    with Screen(stderr=True).status("comparing the laws"):
        extension = plan_extension(
            ropes, to, kind=kind, context=context, factors=divisors, parameters=parameters
        )
    # write first, so that nothing is printed if that fails
    path = write_config(extension, law, model, ropes, folder, **load_options) if folder else None
    if as_json:
        print_json(extension.as_plain(law))
    elif path is not None:
        print_written(extension, law, model, path)
    else:
        print_plan(extension, law)


def _read_divisors(path: Path) -> list[float]:
    """LongRoPE's divisors in a JSON file."""
    divisors = read_source(path).values.get("long_factor")
    if not isinstance(divisors, list):
        raise SpecError(f"{path} must hold an object with a list called long_factor")
    return cast(list[float], divisors)


def _parse_setting(setting: str) -> tuple[str, Any]:
    name, _, text = setting.partition("=")
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, (bool, int, float)):
        raise click.UsageError(
            f"--set takes NAME=NUMBER, NAME=true or NAME=false, got {setting!r}."
        )
    return name, value


def write_config(
    extension: ExtensionPlan,
    law: str | None,
    model: str,
    ropes: LayerRopes,
    folder: Path,
    **load_options: Any,
) -> Path:
    """Write the config of ``model``, changed by the plan, to ``folder``; return its path."""
    if not Path(model).exists() or not ropes.in_config.values:
        raise SpecError(
            "--write changes a copy of a Hugging Face config.json: give its path, or that of its "
            f"folder, as MODEL, got {model!r}"
        )
    config, way = extension.config_with(read_source(model).values, law), extension.option(law)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PhasorWarning)
        reloaded = load(config, **load_options)
    if any(reloaded.kinds[kind] != way.config_rope for kind in extension.kinds):
        raise ConfigError(
            f"{model} with the new keys would describe a different rope than planned; edit it by "
            f"hand, without --write"
        )
    text = json.dumps(config, indent=2, default=_refuse_value) + "\n"
    path = folder / "config.json"
    if path.exists() or path.is_symlink():
        raise SpecError(
            f"{path} exists already: --write makes a new file, so choose another folder"
        )
    is_new = not folder.exists()
    folder.mkdir(exist_ok=True)
    try:
        write_file(path, text)
    except SpecError:
        if is_new:
            folder.rmdir()
        raise
    return path


def _refuse_value(value: object) -> NoReturn:
    """Refuse a value that JSON cannot represent, such as that of a duplicate YAML key."""
    raise ConfigError(f"--write copies every key of the file, but JSON cannot hold {value!r}")


def print_written(extension: ExtensionPlan, law: str | None, model: str, path: Path) -> None:
    """Print the written file, the programs that read it, and how to serve it."""
    screen, option, folder = Screen(), extension.option(law), path.parent
    assert option.file_keys is not None, "it was written"
    screen.print_line(f"Written: {path}, for {extension.to} tokens by {option.name}.")
    source = Path(model) if Path(model).is_dir() else Path(model).parent
    lines = (
        option.file_keys.readers,
        f"The folder has no weights: copy or link those of {source}, and the tokenizer, into it.",
        f"To serve it: phasor translate {folder} --to vllm (or sglang, llama.cpp, gguf).",
    )
    screen.print_lines(lines, "  ")


def print_plan(extension: ExtensionPlan, law: str | None) -> None:
    """Print the documented law, a table of all laws with their evidence, and config keys."""
    screen = Screen()
    chosen = None if law is None and extension.recommended is None else extension.option(law)
    screen.print_line((extension.model, "bold"), f", {extension.title}")
    screen.print_lines(extension.judgement, "  ")
    names, ways = list(extension.options), extension.options.values()
    columns = {
        "law": names,
        "new phases": [f"{way.pairs_with_new_phases} of {way.rope.num_pairs}" for way in ways],
        "slowest": [f"{way.slowest_turns:.3g}" for way in ways],
        "C(r) < 0": [str(way.sign_change or "none") for way in ways],
        "neighbours": [f"{way.resolution:.3g}" for way in ways],
        "attention factor": [f"{way.rope.attention_factor:.6g}" for way in ways],
    }
    styles = ["green" if name == extension.recommended else None for name in names]
    screen.print_table(columns, words=["law"], styles=styles)
    screen.print_lines((f"{title}: {meaning}" for title, meaning in _COLUMNS.items()), "  ")
    screen.print_lines(["", *extension.costs, ""])
    screen.print_line("Measured on trained models", style="bold")
    measured = {name: way.evidence for name, way in extension.options.items() if way.evidence}
    screen.print_lines((f"{name}: {evidence}" for name, evidence in measured.items()), "  ")
    screen.print_line()
    if chosen is None:
        screen.print_line("--law NAME prints the config.json keys of a law.")
        return
    screen.print_line("config.json keys for ", (chosen.name, "bold"))
    if chosen.file_keys is None:
        screen.print_line(f"  {chosen.refused}")
        return
    if extension.labels:
        are_blocks = "is the block" if len(extension.labels) == 1 else "are the blocks"
        screen.print_line(
            f"  {', '.join(map(repr, extension.labels))} {are_blocks} for these layers; "
            "leave all other blocks unchanged."
        )
    set_these = f"In {extension.inside} set" if extension.inside else "Set"
    removed = chosen.file_keys.to_remove
    remove = f", and remove {', '.join(removed)}" if removed else ""
    if not extension.has_file:
        remove = ", and remove their older names (pass the path of a config.json to see which)"
    screen.print_line(f"  {chosen.file_keys.readers}")
    screen.print_line(f"  {set_these} these keys{remove}:")
    screen.print(json.dumps(chosen.config, indent=2), soft_wrap=True)
