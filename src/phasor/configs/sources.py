"""Where a config comes from: a file, a folder, standard input, a dictionary, a live object."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from phasor._checks import shown, twice
from phasor.configs.block import Block
from phasor.errors import ConfigError

SIZE_LIMIT = 16 * 2**20
_NAMES = ("config.json", "params.json")


def read_source(source: object) -> Block:
    """The top-level object of a file, a folder that holds one, ``-``, a dictionary or a config.

    Raises:
        ConfigError: If there is nothing to read, too much of it, or no JSON object.
    """
    # a config of transformers says itself what its file would say
    as_dict = getattr(source, "to_dict", None)
    if not isinstance(source, (type, Mapping)) and callable(as_dict):
        source = as_dict()
    if isinstance(source, Mapping):
        strays = [key for key in cast(Mapping[object, Any], source) if not isinstance(key, str)]
        if strays:
            raise ConfigError(f"keys must be strings, got {shown(strays[0])}")
        return Block(cast(Mapping[str, Any], source))
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(
            "source must be the path of a config file or folder, '-', the dictionary it holds or a "
            f"config of transformers, got {shown(source)}"
        )
    if source == "-":
        return Block(_parsed(sys.stdin.buffer.read(SIZE_LIMIT + 1), "standard input"))
    try:
        path = Path(cast("str | os.PathLike[str]", source))
        if path.is_dir():
            path = _inside(path)
        # a pipe without a writer would be waited for, for ever
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{path} is not a file; give the path of a config.json")
        with path.open("rb") as stream:
            data = stream.read(SIZE_LIMIT + 1)
    except FileNotFoundError:
        raise ConfigError(f"{source} is not a file; give the path of a config.json") from None
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{shown(cast(object, source))} cannot be read: {error}") from None
    if data.startswith(b"GGUF"):
        return Block(_gguf_header(path))
    return Block(_parsed(data, str(path)))


def _inside(folder: Path) -> Path:
    found = [folder / name for name in _NAMES if (folder / name).is_file()]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"{folder} holds both config.json and params.json, which describe differently "
            "paired weights; give the path of the one that belongs to your weights"
        )
    # a pipeline of diffusers: its transformer is what rotates
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
            "pip install 'phasor[gguf]'"
        ) from None
    try:
        # maps the file; what is not asked for is never read
        file = GGUFReader(path)
        header = {name: one.contents() for name, one in file.fields.items() if _is_plain(name)}
        ropes = [one for one in file.tensors if one.name.startswith("rope_")]
        return header | {one.name: one.data.astype(float).tolist() for one in ropes}
    except Exception as error:  # what a reader makes of damaged bytes has no common class
        raise ConfigError(f"{path} is a damaged GGUF file: {error}") from None


def _is_plain(name: str) -> bool:
    # a vocabulary takes longer than all else together
    return not name.startswith("tokenizer.")


def _parsed(data: bytes, origin: str) -> dict[str, Any]:
    if len(data) > SIZE_LIMIT:
        raise ConfigError(
            f"{origin} is larger than {SIZE_LIMIT // 2**20} MiB, which no config file is; "
            "give the config.json that lies beside the weights"
        )
    try:
        value = json.loads(
            data.decode("utf-8-sig"),
            object_pairs_hook=_unique,
        )
    except UnicodeDecodeError as error:
        raise ConfigError(f"{origin} must be UTF-8 text, got {error}") from None
    except RecursionError:
        raise ConfigError(f"{origin} is nested too deeply for a config file") from None
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{origin} must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{origin} must hold a JSON object, got {shown(value)}")
    return cast(dict[str, Any], value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if (key := twice(pairs)) is not None:
        raise ConfigError(f"the key {shown(key)} stands twice in one object; keep one")
    return dict(pairs)
