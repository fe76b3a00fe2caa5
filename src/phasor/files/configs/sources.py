"""Reads a config, and selects the config inside it that describes the part to load.

A source is a file, a folder, standard input, a dictionary or a config object of transformers. The
part is the language model of a larger model, or the config at a key that the caller names.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard, cast

from phasor._checks import first_repeated, short_repr
from phasor.errors import ConfigError
from phasor.files.configs.block import Block
from phasor.files.configs.facts import Architecture, table
from phasor.files.configs.gguf_header import read_gguf_header
from phasor.files.configs.laws import normalize

SIZE_LIMIT = 16 * 2**20
_FILE_NAMES = ("config.json", "params.json")


def read_source(source: object) -> Block:
    """The top-level object of a file, a folder that holds one, ``-``, a dictionary or a config.

    Raises:
        ConfigError: If there is nothing to read, too much of it, or no JSON object.
    """
    # a config object of transformers: the dictionary it would save
    as_dict = getattr(source, "to_dict", None)
    if not isinstance(source, (type, Mapping)) and callable(as_dict):
        source = as_dict()
    if isinstance(source, Mapping):
        not_text = [key for key in cast(Mapping[object, Any], source) if not isinstance(key, str)]
        if not_text:
            raise ConfigError(f"keys must be strings, got {short_repr(not_text[0])}")
        return Block(cast(Mapping[str, Any], source))
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(
            "source must be the path of a config file or folder, '-', the dictionary it holds or a "
            f"config of transformers, got {short_repr(source)}"
        )
    source = cast("str | os.PathLike[str]", source)
    if source == "-":
        return Block(_parse_json(sys.stdin.buffer.read(SIZE_LIMIT + 1), "standard input"))
    try:
        path = Path(source)
        if path.is_dir():
            path = _config_file_in(path)
        # opening a pipe that has no writer would block for ever
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{path} is not a file; give the path of a config.json")
        with path.open("rb") as stream:
            data = stream.read(SIZE_LIMIT + 1)
    except FileNotFoundError:
        way_out = "give the path of a config.json"
        if is_hub_id(str(source)) and not str(source).endswith((".json", ".gguf")):
            way_out = (
                "if it is a repository of the Hugging Face Hub, its config is not in the local "
                f"cache: `hf download {source} config.json` (of huggingface_hub) fetches it"
            )
        raise ConfigError(f"{source} is not a file; {way_out}") from None
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{short_repr(source)} cannot be read: {error}") from None
    if data.startswith(b"GGUF"):
        return Block(read_gguf_header(path))
    if (what := table().files["other_files"].get(path.suffix)) is not None:
        raise ConfigError(f"{path} {what}")
    return Block(_parse_json(data, str(path)))


def cached_config(repository: str) -> Path | None:
    """The config of a repository of the Hub in the local cache; nothing is downloaded."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = [try_to_load_from_cache(repository, name) for name in _FILE_NAMES]
    except (ImportError, ValueError):  # or a name that no repository of the Hub can have
        return None
    return next((Path(path) for path in found if isinstance(path, str)), None)


def is_hub_id(source: object) -> TypeGuard[str]:
    """Whether ``source`` reads as ``owner/name`` and there is no such file."""
    return (
        isinstance(source, str)
        and re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None
        and not source.startswith(".")
        and not Path(source).exists()
    )


def _config_file_in(folder: Path) -> Path:
    files = [folder / name for name in _FILE_NAMES if (folder / name).is_file()]
    if len(files) == 1:
        return files[0]
    if files:
        raise ConfigError(
            f"{folder} holds both config.json and params.json, which describe differently "
            "paired weights; give the path of the one that belongs to your weights"
        )
    # a pipeline of diffusers has the rope in its transformer, and an adapter names its model
    for inner in (folder / "transformer" / "config.json", folder / "adapter_config.json"):
        if inner.is_file():
            return inner
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".json", ".gguf"))
    found = f"; it holds {', '.join(others[:8])}: give the path of a config" if others else ""
    raise ConfigError(f"{folder} holds neither config.json nor params.json{found}")


def _parse_json(data: bytes, origin: str) -> dict[str, Any]:
    if len(data) > SIZE_LIMIT:
        raise ConfigError(
            f"{origin} is larger than {SIZE_LIMIT // 2**20} MiB, which no config file is; "
            "give the config.json that lies beside the weights"
        )
    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_refuse_repeated_keys)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{origin} must be UTF-8 text, got {error}") from None
    except RecursionError:
        raise ConfigError(f"{origin} is nested too deeply for a config file") from None
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{origin} must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{origin} must hold a JSON object, got {short_repr(value)}")
    return cast(dict[str, Any], value)


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if (key := first_repeated(pairs)) is not None:
        raise ConfigError(f"the key {short_repr(key)} stands twice in one object; keep one")
    return dict(pairs)


def language_models(top: Block) -> list[Block]:
    """``top`` and each config inside it that describes its language model, the innermost last.

    Raises:
        ConfigError: If two of one level do, or one is no object.
    """
    levels, keys = [top], table().files["language_models"]
    while inner := [key for key in keys if levels[-1].has(key)]:
        outer = levels[-1]
        if len(inner) > 1:
            raise ConfigError(
                f"{outer.name(inner[0])} and {outer.name(inner[1])} both describe a language "
                f"model; name the one you mean: load(..., part={inner[0]!r})"
            )
        levels.append(cast(Block, outer.block(inner[0])))
    return levels


def select_config(top: Block, part: str | None, like: str | None) -> tuple[list[Block], str]:
    """The configs from the top to the selected part, the innermost last, and its model type.

    Args:
        top: The file.
        part: Its key, dotted where it lies deeper; None for the language model.
        like: A model type that replaces the file's own.

    Raises:
        ConfigError: If there is no such part, or its type is absent or unknown.
    """
    levels = language_models(top) if part is None else _path_to_part(top, part)
    for outer, inner in pairwise(levels) if part is None else ():
        _check_same_ropes(outer, inner)
    known, name, config = table().huggingface, type_in_file(levels), levels[-1]
    if like is not None and like not in known:
        raise ConfigError(
            "like must be a model type that phasor knows (phasor.files.configs.model_types() "
            f"lists them), got {short_repr(like)}"
        )
    proposed = _type_of_architectures(config)
    model_type = like or name or proposed
    if model_type is not None and model_type in known:
        return levels, model_type
    for file in table().files["foreign_files"]:
        if name is None and all(map(config.has, file["keys"])):
            raise ConfigError(file["says"].format_map(config.values))
    ways_out = "describe its embedding with phasor.Rope(...)"
    if part is None and (inner := _known_inner_config(top)) is not None:
        ways_out = f"read the {inner} inside: load(..., part={inner!r}), on the command line --part"
    elif proposed is not None and not config.has("auto_map"):
        ways_out = (
            f"its architectures are those of {proposed}, as which load(..., like={proposed!r}), on "
            f"the command line --like {proposed}, reads it; or {ways_out}"
        )
    if name is None:
        raise ConfigError(
            f"{config.name('model_type')} is absent, and without it the pairing of coordinates is "
            f"unknown; add it, or {ways_out}"
        )
    raise ConfigError(
        f"{config.name('model_type')} must be one that phasor knows "
        f"(phasor.files.configs.model_types() lists them), got {short_repr(name)}; {ways_out}"
    )


def _type_of_architectures(config: Block) -> str | None:
    """The known type whose classes the file names, if the file has the sizes that it reads."""
    named = config.values.get("architectures")
    names = cast("list[object]", named) if isinstance(named, (list, tuple)) else []
    known = _types_by_stem()
    for name in names:
        stem = re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)$", "", str(name)).lower()
        if stem in known and _states_sizes(config, table().huggingface[known[stem]]):
            return known[stem]
    return None


@lru_cache(maxsize=1)
def _types_by_stem() -> Mapping[str, str]:
    """The known types by the stem of their classes' names, in small letters: ``gptneox``."""
    # sorted, so that of "Emu3" and "emu3" the latter is taken
    return {re.sub("[_-]", "", name).lower(): name for name in sorted(table().huggingface)}


def _known_inner_config(top: Block) -> str | None:
    """The key of the one config inside the file that has a known type and sizes."""
    found: list[str] = []
    for inner in top.unread_objects():
        facts = table().huggingface.get(str(inner.values.get("model_type")))
        is_other = re.search(table().files["other_models"], inner.path)
        if facts is not None and not is_other and _states_sizes(inner, facts):
            found.append(inner.path)
    return found[0] if len(found) == 1 else None


def _states_sizes(config: Block, facts: Architecture) -> bool:
    """Whether a file says what the ropes of a type need: layers, and the width of a head."""
    has = Block(config.values, names=facts.names).has
    has_width = has(facts.width_key) or (
        not facts.latent and has("hidden_size") and has("num_attention_heads")
    )
    return facts.uses is None and facts.refused is None and has("num_hidden_layers") and has_width


def _path_to_part(top: Block, part: str) -> list[Block]:
    levels = [top]
    for key in part.split("."):
        if not isinstance(levels[-1].values.get(key), Mapping):
            inner = [k for k, v in levels[-1].values.items() if isinstance(v, Mapping)]
            raise ConfigError(
                f"part must be the key of a config inside the file "
                f"({', '.join(inner) or 'it holds none'}), got {short_repr(part)}"
            )
        levels.append(cast(Block, levels[-1].block(key)))
    return levels


def type_in_file(levels: list[Block]) -> str | None:
    """The innermost config's type: its own, the one its outer class implies, or the outer one."""
    model_type: str | None = None
    known, marks = table().huggingface, table().files["marks"]
    for i, level in enumerate(levels):
        key = level.path.rpartition(".")[2]
        outer = None if model_type is None or i == 0 else known.get(model_type)
        implied_type = None if outer is None else outer.parts.get(key)
        # keys that one program alone writes
        marked = (name for name, keys in marks.items() if all(map(level.has, keys)))
        file_type = level.text("model_type") or next(marked, None)
        # transformers also saves the type of the whole model in the configs of its parts
        if implied_type is not None and file_type in (None, model_type):
            model_type = implied_type
        else:
            model_type = file_type or model_type
    return model_type


def _check_same_ropes(outer: Block, inner: Block) -> None:
    for key in ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"):
        if outer.has(key) and normalize(outer.values.get(key)) != normalize(inner.values.get(key)):
            raise ConfigError(
                f"{outer.name(key)} and {inner.name(key)} differ; the inner one counts, so "
                "remove the outer one or make them agree"
            )
