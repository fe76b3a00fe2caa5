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
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard, cast

from phasor._checks import first_repeated, short_repr
from phasor.configs.block import Block
from phasor.configs.facts import table
from phasor.configs.laws import normalize
from phasor.errors import ConfigError, install_hint

SIZE_LIMIT = 16 * 2**20
_FILE_NAMES = ("config.json", "params.json")
_UNKNOWN_TYPE_HINT = (
    "if its code rotates as a known type's does, read it as that one: load(..., like='llama'), "
    "on the command line --like llama; else describe its embedding with phasor.Rope(...)"
)


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
    if source == "-":
        return Block(_parse_json(sys.stdin.buffer.read(SIZE_LIMIT + 1), "standard input"))
    try:
        path = Path(cast("str | os.PathLike[str]", source))
        if path.is_dir():
            path = _config_file_in(path)
        # opening a pipe that has no writer would block for ever
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{path} is not a file; give the path of a config.json")
        with path.open("rb") as stream:
            data = stream.read(SIZE_LIMIT + 1)
    except FileNotFoundError:
        download = _download_hint(str(cast(object, source)))
        raise ConfigError(
            f"{source} is not a file; {download or 'give the path of a config.json'}"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{short_repr(cast(object, source))} cannot be read: {error}") from None
    if data.startswith(b"GGUF"):
        return Block(_gguf_header(path))
    return Block(_parse_json(data, str(path)))


def cached_config(repository: str) -> Path | None:
    """The config of a repository of the Hub in the local cache; nothing is downloaded."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    for name in _FILE_NAMES:
        try:
            path = try_to_load_from_cache(repository, name)
        except HFValidationError:
            return None
        if isinstance(path, str):
            return Path(path)
    return None


def is_hub_id(source: object) -> TypeGuard[str]:
    """Whether ``source`` reads as ``owner/name`` and there is no such file."""
    return (
        isinstance(source, str)
        and re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None
        and not source.startswith(".")
        and not Path(source).exists()
    )


def _download_hint(source: str) -> str:
    if not is_hub_id(source) or source.endswith((".json", ".gguf")):
        return ""
    return (
        "if it is a repository of the Hugging Face Hub, its config is not in the local cache: "
        f"`hf download {source} config.json` (of huggingface_hub) fetches it"
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
    # a pipeline of diffusers: its transformer has the rope
    inner = folder / "transformer" / "config.json"
    if inner.is_file():
        return inner
    raise ConfigError(f"{folder} holds neither config.json nor params.json; name the file")


def _gguf_header(path: Path) -> dict[str, Any]:
    """Metadata of a GGUF file by key, and its tensors about the rope as lists; no weights."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ConfigError(
            f"{path} is a binary GGUF file, which is read with the gguf package: "
            f"{install_hint('gguf')}"
        ) from None
    try:
        # the reader maps the file into memory, so it reads no weights from the disk
        file = GGUFReader(path)
        header = {
            name: field.contents()
            for name, field in file.fields.items()
            if not name.startswith("tokenizer.")  # a vocabulary takes longer than all other fields
        }
        tensors = [tensor for tensor in file.tensors if tensor.name.startswith("rope_")]
        return header | {tensor.name: tensor.data.astype(float).tolist() for tensor in tensors}
    except Exception as error:  # the reader's errors on damaged bytes have no common base class
        raise ConfigError(f"{path} is a damaged GGUF file: {error}") from None


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
    levels, keys = [top], table().key_lists["language_models"]
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
    if part is None:
        levels = language_models(top)
        for outer, inner in pairwise(levels):
            _check_same_ropes(outer, inner)
    else:
        levels = _path_to_part(top, part)
    known = table().huggingface
    name = _model_type(levels)
    if like is not None:
        if like not in known:
            raise ConfigError(
                f"like must be a model type that phasor knows (phasor.configs.model_types() lists "
                f"them), got {short_repr(like)}"
            )
        return levels, like
    key = levels[-1].name("model_type")
    if name is None:
        raise ConfigError(
            f"{key} is absent, and without it the pairing of coordinates is unknown; add it; "
            f"{_UNKNOWN_TYPE_HINT}"
        )
    if name not in known:
        raise ConfigError(
            f"{key} must be one that phasor knows (phasor.configs.model_types() lists them), "
            f"got {short_repr(name)}; {_UNKNOWN_TYPE_HINT}"
        )
    return levels, name


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


def _model_type(levels: list[Block]) -> str | None:
    """The innermost config's type: its own, the one its outer class implies, or the outer one."""
    model_type: str | None = None
    known = table().huggingface
    for i, level in enumerate(levels):
        key = level.path.rpartition(".")[2]
        outer = None if model_type is None or i == 0 else known.get(model_type)
        implied_type = None if outer is None else outer.parts.get(key)
        file_type = level.text("model_type") or _type_by_keys(level)
        # transformers also saves the type of the whole model in the configs of its parts
        if implied_type is not None and file_type in (None, model_type):
            model_type = implied_type
        else:
            model_type = file_type or model_type
    return model_type


def _type_by_keys(config: Block) -> str | None:
    """The type of a file that names none, by keys that one program alone writes."""
    marks = table().marks.items()
    return next((name for name, keys in marks if all(map(config.has, keys))), None)


def _check_same_ropes(outer: Block, inner: Block) -> None:
    for key in ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"):
        if outer.has(key) and normalize(outer.values.get(key)) != normalize(inner.values.get(key)):
            raise ConfigError(
                f"{outer.name(key)} and {inner.name(key)} differ; the inner one counts, so "
                "remove the outer one or make them agree"
            )
