"""The files of a checkpoint: one, or shards with an index that says which tensor is in which."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, cast

from phasor._checks import shown
from phasor.checkpoint.format import Entry, Header, open_file, parse_json, read_header
from phasor.errors import CheckpointError

_INDEX = ".safetensors.index.json"
_INDEX_LIMIT = 100_000_000
CHUNK = 8 * 2**20  # bytes read at a time
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Safetensors files that belong together.

    Attributes:
        path: The folder, or the one file.
        files: The header of each file, by its path below the folder.
        index: Name of the index, None where there is none.
    """

    path: Path
    files: Mapping[str, Header]
    index: str | None

    @property
    def is_folder(self) -> bool:
        """Whether the files lie in a folder that was given as such."""
        return self.path.is_dir()

    def location(self, name: str) -> Path:
        """Where the file ``name`` is."""
        return self.path / name if self.is_folder else self.path

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(header.size for header in self.files.values())

    def tensors(self) -> Iterator[tuple[str, Entry]]:
        """All tensors by name."""
        for header in self.files.values():
            yield from header.tensors.items()


def open_checkpoint(source: Path) -> Checkpoint:
    """The checkpoint at ``source``: a safetensors file, or a folder that holds one.

    A folder holds either one index and the shards that it names, or one safetensors file.

    Raises:
        CheckpointError: If there is none, or more than one, or a file is missing or damaged.
    """
    if not source.exists():
        raise CheckpointError(f"{source} does not exist; give a safetensors file or its folder")
    if not source.is_dir():
        if source.name.endswith(_INDEX):
            raise CheckpointError(f"{source} is an index; give the folder it lies in")
        return Checkpoint(source, MappingProxyType({source.name: read_header(source)}), None)
    indexes = sorted(path.name for path in source.glob(f"*{_INDEX}"))
    if len(indexes) > 1:
        raise CheckpointError(f"{source} holds several indexes ({', '.join(indexes)}); keep one")
    if indexes:
        return _sharded(source, indexes[0])
    found = sorted(path.name for path in source.glob("*.safetensors"))
    if len(found) == 1:
        headers = {found[0]: read_header(source / found[0])}
        return Checkpoint(source, MappingProxyType(headers), None)
    if found:
        raise CheckpointError(
            f"{source} holds {len(found)} safetensors files and no index that ties them together "
            f"({shown(', '.join(found))}); give one file, or add the index"
        )
    others = sorted(
        path.name for ending in ("bin", "pt", "pth") for path in source.glob(f"*.{ending}")
    )
    have = f", only {shown(', '.join(others))}" if others else ""
    raise CheckpointError(
        f"{source} holds no safetensors file{have}; write the tensors with the safetensors "
        "library first"
    )


def _sharded(folder: Path, index: str) -> Checkpoint:
    shard_of = _weight_map(folder / index)
    headers: dict[str, Header] = {}
    for shard in sorted(set(shard_of.values())):
        if not (folder / shard).is_file():
            raise CheckpointError(f"{folder / index} names {shown(shard)}, which is missing")
        headers[shard] = read_header(folder / shard)
    holder: dict[str, str] = {}
    for shard, header in headers.items():
        for name in header.tensors:
            if name in holder:
                raise CheckpointError(
                    f"{shown(name)} stands in {holder[name]} and in {shard}; keep one"
                )
            holder[name] = shard
    for name, shard in shard_of.items():
        if holder.get(name) != shard:
            raise CheckpointError(
                f"{folder / index} says that {shown(name)} is in {shard}, which does not hold it"
            )
    return Checkpoint(folder, MappingProxyType(headers), index)


def _weight_map(path: Path) -> dict[str, str]:
    try:
        with open_file(path) as stream:
            data = stream.read(_INDEX_LIMIT + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(data) > _INDEX_LIMIT:
        raise CheckpointError(f"{path} is larger than any index")
    found = parse_json(data, str(path)).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(
            f"{path} must hold a weight_map of tensors, got {shown(cast(object, found))}"
        )
    for shard in cast(dict[str, Any], found).values():
        # a name with a folder in it could lead out of the checkpoint
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(
                f"{path}: weight_map must name files beside the index, got {shown(shard)}"
            )
    return cast(dict[str, str], found)


def no_progress(count: int) -> None:
    """For who does not want to know."""


def exactly(stream: BinaryIO, count: int) -> bytes:
    """The next ``count`` bytes.

    Raises:
        CheckpointError: If the file ends before, which its header did not say.
    """
    data = stream.read(count)
    if len(data) != count:
        raise CheckpointError(f"{stream.name} became shorter while it was read")
    return data
