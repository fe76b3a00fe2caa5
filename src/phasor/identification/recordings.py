"""Recordings: vectors before and after a rotation, or tables of cos and sin, as programs kept them.

A recording is a mapping of arrays, a ``.safetensors`` or ``.npz`` file of them, or a module that
holds tables. Files stay on disk, and only arrays that are needed are read.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from phasor._checks import short_repr, unmasked
from phasor.angles import as_positions
from phasor.errors import CheckpointError, PhasorError, TensorError
from phasor.files.tensors import FLOATS, open_file, read_header
from phasor.identification.spectrum import ROUNDING, Complex, coarsest_dtype
from phasor.identification.turns import Sample, arrangement_of, drop_repeats
from phasor.rope import Rope

#: Orders of dimensions: batch, sequence, heads, coordinates. Without ``h`` a row has all heads.
DIMS = {2: ("sd",), 3: ("shd", "hsd", "bsd", "dhs"), 4: ("bshd", "bhsd", "sbhd", "dhsb", "dshb")}
SIDES = ("q", "k", "qk")
TABLES = ("cos", "sin", "cos_sin_cache", "freqs_cis", "freqs", "cos_cache", "sin_cache")
_ATTRIBUTES = ("cos_cached", "sin_cached", *TABLES)  # of modules that hold tables
_KNOWN = {"positions", *TABLES, *(side + end for side in SIDES for end in ("", "_rotated"))}
# "q", "layers.3.q", "model.layers.3.self_attn.q_rotated", "blk.3.k"
_LAYER = re.compile(r"(?:^|\.)(?:layers?|blocks?|blk|h)\.(\d+)(?=\.)")
# whole numbers of safetensors: "I64" is int64
_WHOLE = {f"{w[0].upper()}{n}": f"{w}{n}" for w in ("int", "uint") for n in (8, 16, 32, 64)}
_MAX_DIGITS = 9  # of a layer
# bytes of a file's compressed arrays, which are read as a whole
_MAX_COMPRESSED = 1 << 28
# if so many different numbers all fit a coarser dtype, they were rounded to it
_TELLING = 32

#: The arrays of a layer by name; bfloat16, which NumPy lacks, as its two bytes.
Arrays = Mapping[str, NDArray[Any]]


def dtype_of(array: NDArray[Any]) -> str:
    """The name of an array's dtype."""
    return "bfloat16" if array.dtype == "V2" else str(array.dtype)


def floats(array: NDArray[Any], index: Any = ...) -> NDArray[Any]:
    """Some numbers of an array, in float64 or complex128."""
    part = np.asarray(array[index])
    if part.dtype == "V2":
        part = (part.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return part.astype(np.complex128 if part.dtype.kind == "c" else np.float64)


def read_recording(source: object) -> dict[int | None, dict[str, NDArray[Any]]]:
    """The arrays of a recording by layer (None where a name has none) and name."""
    if isinstance(source, (str, Path)):
        arrays = _read_file(Path(source))
    elif isinstance(source, Mapping):
        arrays = iter(cast(Mapping[object, object], source).items())
    else:
        attributes = ((name, getattr(source, name, None)) for name in _ATTRIBUTES)
        arrays = ((name, value) for name, value in attributes if hasattr(value, "shape"))
    layers: dict[int | None, dict[str, NDArray[Any]]] = {}
    names: dict[tuple[int | None, str], str] = {}
    for name, value in ((f"{name}", value) for name, value in arrays):
        prefix, dot, last = name.rpartition(".")
        short = last.replace("_cached", "")
        digits = _LAYER.findall(prefix + dot)[-1:]  # of nested layers, the innermost
        if short not in _KNOWN or len("".join(digits)) > _MAX_DIGITS:
            raise TensorError(
                f"a recording holds positions, q and q_rotated (k and k_rotated, layers.3.q), or "
                f"cos and sin, cos_sin_cache, freqs_cis or freqs; got {short_repr(name)}"
            )
        layer = int(digits[0]) if digits else None
        if (other_name := names.get((layer, short))) is not None:
            raise TensorError(
                f"a recording holds one {short} of a layer, got {short_repr(other_name)} and "
                f"{short_repr(name)}; name them by layer, as layers.3.{short}, or verify each alone"
            )
        names[layer, short] = name
        layers.setdefault(layer, {})[short] = _as_array(name, value)
    if not layers:
        text = "a recording must hold positions, q and q_rotated, or tables; got nothing"
        raise TensorError(text)
    return layers


def _read_file(path: Path) -> Iterator[tuple[str, object]]:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a .safetensors or .npz file")
    with open_file(path) as stream:
        is_zip = stream.read(4) == b"PK\x03\x04"
    if is_zip:
        yield from _read_npz(path)
        return
    for name, entry in read_header(path).tensors.items():
        dtype = (FLOATS | _WHOLE).get(entry.dtype, entry.dtype)
        _check_dtype(name, dtype)
        stored_dtype = np.dtype("V2" if dtype == "bfloat16" else dtype).newbyteorder("<")
        yield name, _map_array(path, stored_dtype, entry.begin, entry.shape)


def _map_array(
    path: Path, dtype: np.dtype[Any], begin: int, shape: tuple[int, ...], is_fortran: bool = False
) -> NDArray[Any]:
    """An array mapped from a file, so that only the parts in use are read."""
    if not prod(shape):
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", begin, shape, "F" if is_fortran else "C")


def _read_npz(path: Path) -> Iterator[tuple[str, object]]:
    """Arrays of a zip of ``.npy`` files; those that are not compressed are mapped into memory."""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as stream:
            items = archive.infolist()
            compressed = [entry for entry in items if entry.compress_type != zipfile.ZIP_STORED]
            if (size := sum(entry.file_size for entry in compressed)) > _MAX_COMPRESSED:
                raise TensorError(
                    f"{path} holds {size} bytes in compressed arrays: write it with numpy.savez, "
                    "or as safetensors, of which parts can be read"
                )
            for item in items:
                name = item.filename.removesuffix(".npy")
                with archive.open(item) as member:
                    is_first = npy.read_magic(member) == (1, 0)
                    read_array_header = (
                        npy.read_array_header_1_0 if is_first else npy.read_array_header_2_0
                    )
                    shape, is_fortran, dtype = read_array_header(member)
                    header_size = member.tell()
                expected_size = header_size + prod(shape) * dtype.itemsize
                if expected_size != item.file_size:
                    raise CheckpointError(
                        f"{path}: {name} must have the {expected_size} bytes that its header "
                        f"announces, got {item.file_size}; write the file again"
                    )
                if item.compress_type != zipfile.ZIP_STORED:
                    with archive.open(item) as member:
                        yield name, npy.read_array(member, allow_pickle=False)
                    continue
                # after 30 bytes come the name and an extra field, whose sizes are the last 4 bytes
                stream.seek(item.header_offset + 26)
                sizes = np.frombuffer(stream.read(4), "<u2")
                begin = item.header_offset + 30 + int(sizes.sum()) + header_size
                yield name, _map_array(path, dtype, begin, shape, is_fortran)
    except PhasorError:
        raise
    except Exception as error:  # of damaged bytes zipfile, zlib and NumPy each raise their own
        raise CheckpointError(f"{path} is damaged or no .npz file: {error}") from None


def _as_array(name: str, value: Any) -> NDArray[Any]:
    """A NumPy array from one of NumPy, torch, JAX or MLX."""
    unmasked(name, value, TensorError)
    text = str(getattr(value, "dtype", ""))
    is_torch, text = text.startswith("torch."), text.removeprefix("torch.")
    if is_torch:
        _check_dtype(name, text)
    try:
        if is_torch:
            value = value.detach().cpu()
            # NumPy has no bfloat16
            value = value.view(import_module("torch").int16) if text == "bfloat16" else value
        elif "mlx" in text and text.endswith("bfloat16"):
            value = value.astype(import_module("mlx.core").float32)
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # such as torch's error for meta tensors
        raise TensorError(f"{name} must be an array of numbers: {error}") from None
    # the bfloat16 of torch, of ml_dtypes, and of an ml_dtypes array that numpy.load has read
    is_bfloat16 = text == "bfloat16" or str(array.dtype) in ("bfloat16", "|V2")
    _check_dtype(name, "bfloat16" if is_bfloat16 else str(array.dtype))
    return array.view("V2") if is_bfloat16 else array


def _check_dtype(name: str, dtype: str) -> None:
    if name.endswith("positions"):
        if not re.fullmatch(r"u?int\d+|float(32|64)", dtype):
            raise TensorError(f"{name} must be whole numbers, float32 or float64, got {dtype}")
        return
    words = (*ROUNDING, *(["complex64", "complex128"] if name.endswith("freqs_cis") else []))
    if dtype not in words:
        hint = "; 8 bits hold no rotated vectors, record before they are quantized"
        is_8_bits = re.match("float8|F8|u?int8", dtype)
        requirement = f"{name} must be of {', '.join(words)}"
        raise TensorError(f"{requirement}, got {dtype}{hint if is_8_bits else ''}")


class Vectors(NamedTuple):
    """One layer's queries or keys before and after, as views ``[batch, seq, heads, head_dim]``."""

    name: str
    dims: str
    before: NDArray[Any]
    after: NDArray[Any]
    positions: NDArray[Any]  # [batch, seq], or [batch, seq, n_axes]
    dtype: str  # the dtype of the computation
    is_table: bool = False

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0] * self.positions.shape[1]

    def sample(self, tokens: NDArray[np.intp], heads: slice = slice(None)) -> Sample:
        """Some tokens, by their index over all sequences, and some of their heads."""
        index = (*np.divmod(tokens, self.positions.shape[1]), heads)
        before, after = floats(self.before, index), floats(self.after, index)
        return Sample(before, after, self.positions[index[:2]], self.dtype, self.is_table)

    def with_coarsest_dtype(self, tokens: NDArray[np.intp]) -> Vectors:
        """The same vectors with the coarsest dtype that holds all numbers of some tokens.

        Programs that compute in bfloat16 are recorded in float32, because NumPy has no bfloat16.
        A table keeps its own dtype.
        """
        numbers = self.sample(tokens).y
        numbers = np.unique(numbers[np.isfinite(numbers)])
        is_telling = len(numbers) > _TELLING and not self.is_table
        dtype = coarsest_dtype(numbers, ROUNDING[self.dtype]) if is_telling else None
        return self._replace(dtype=dtype or self.dtype)


def vectors_of(arrays: Arrays, side: str, rope: Rope, dims: str | None) -> list[Vectors]:
    """The ways to read the recorded arrays: one for each order of dimensions that fits them."""
    head_dim = rope.head_dim
    for required in ("positions", side, f"{side}_rotated"):
        if required not in arrays:
            raise TensorError(f"a recording with {', '.join(arrays)} must hold {required} too")
    before, after, places = arrays[side], arrays[f"{side}_rotated"], arrays["positions"]
    shape, places = before.shape, as_positions(places)
    if shape != after.shape:
        shapes = f"{list(shape)} and {list(after.shape)}"
        raise TensorError(f"{side} and {side}_rotated must have one shape, got {shapes}")
    letters = f"{dims}"  # of anything that was given
    fit = len(letters) == len(shape) and set("sd") <= set(letters) <= set("bshd")
    if dims is not None and not fit:
        raise TensorError(
            f"dims must have a letter for each dimension of {side}, of b, s, h and d, such as "
            f"'bshd', or 'sd' for [tokens, heads * head_dim]; got {dims!r} for {list(shape)}"
        )
    views: dict[tuple[Any, ...], Vectors] = {}
    for order in DIMS.get(len(shape), ()) if dims is None else (dims,):
        view, turned = _view(before, order, head_dim), _view(after, order, head_dim)
        if view is None or turned is None:
            continue
        tokens = _fit_positions(places, view.shape[:2], rope.axes.n_axes)
        if tokens is None:
            continue
        # a dimension without positions is as good as heads, and one token is as good as a row
        row = "h" if tokens.strides[0] == 0 else "s" if view.shape[1] == 1 else "b"
        column = "h" if tokens.strides[1] == 0 else "s"
        roles = zip(f"{row}{column}hd", view.shape, view.strides, strict=True)
        same = (*sorted(role for role in roles if role[1] > 1),)
        views.setdefault(same, Vectors(side, order, view, turned, tokens, dtype_of(after)))
    if not views:
        shapes_given = f"{list(shape)} and positions {list(places.shape)}"
        raise TensorError(
            f"{side} must be [tokens, heads * {head_dim}] or have dimensions such as bshd or bhsd "
            f"with d = {head_dim}, the rope's head_dim, and a position for each token; got "
            f"{shapes_given}{'' if dims is None else f' as {dims!r}'}"
        )
    return list(views.values())


def _view(array: NDArray[Any], dims: str, head_dim: int) -> NDArray[Any] | None:
    """``[batch, seq, heads, head_dim]``, or None if the sizes do not fit."""
    if "h" not in dims:  # a row is all heads
        if dims[-1] != "d" or array.shape[-1] % head_dim or not array.size:
            return None
        array, dims = array.reshape(*array.shape[:-1], -1, head_dim), f"{dims[:-1]}hd"
    if array.shape[dims.index("d")] != head_dim or 0 in array.shape:
        return None
    if "b" not in dims:
        array, dims = array[None], f"b{dims}"
    return array.transpose([dims.index(letter) for letter in "bshd"])


def _fit_positions(
    places: NDArray[Any], tokens: tuple[int, ...], n_axes: int
) -> NDArray[Any] | None:
    """Positions ``[batch, seq]``, or ``[batch, seq, n_axes]``; None if they do not fit."""
    if n_axes > 1 and places.ndim > 1 and places.shape[-1] != n_axes and places.shape[0] == n_axes:
        places = np.moveaxis(places, 0, -1)
    elif n_axes > 1 and places.shape[-1:] != (n_axes,):
        places = np.repeat(places[..., None], n_axes, axis=-1)  # one coordinate stands for all
    axes = (n_axes,) if n_axes > 1 else ()
    shape = places.shape[: places.ndim - len(axes)]
    is_flat = 1 in (len(shape), tokens[0])
    if shape == tokens or (is_flat and places.size == prod(tokens + axes)):
        return places.reshape(tokens + axes)
    if shape in ((tokens[1],), (1, tokens[1]), (1,), ()):
        return np.broadcast_to(places, tokens + axes)
    return None


def rows_of_tables(arrays: Arrays, rope: Rope | None) -> tuple[Complex, str]:
    """Rows ``gain * (cos + i sin)`` ``[P, num_pairs]``, and their dtype."""
    tables = {name: array for name, array in sorted(arrays.items()) if name in TABLES}
    values, pair = [floats(array) for array in tables.values()], list[NDArray[Any]]()
    match list(tables):
        case ["cos", "sin"] | ["cos_cache", "sin_cache"]:
            pair = values
        case ["cos_sin_cache"] if values[0].shape[-1:] and values[0].shape[-1] % 2 == 0:
            pair = np.split(values[0], 2, axis=-1)
        case ["freqs"]:
            pair = [np.cos(values[0]), np.sin(values[0])]
        case ["freqs_cis"] if np.iscomplexobj(values[0]):
            pair = [np.real(values[0]), np.imag(values[0])]
        case ["freqs_cis"]:
            pair = [*np.moveaxis(values[0], -1, 0)]
        case _:
            pass
    if len(pair) != 2 or pair[0].shape != pair[1].shape or pair[0].ndim < 2 or not pair[0].size:
        names = ", ".join(name for name in arrays if name in tables) or "positions"
        shapes = " and ".join(str(list(table.shape)) for table in values)
        raise TensorError(
            "a recording must hold q and q_rotated, or tables [positions, pairs]: cos and sin, "
            f"cos_sin_cache, freqs_cis or freqs; got {names} {shapes}"
        )
    rows: Complex = np.asarray(pair[0] + 1j * pair[1], np.complex128)
    *shape, width = rows.shape
    # other dimensions are of length 1, as in [1, 1, P, n] and [P, 1, 1, n]
    if "positions" not in arrays and max(shape) < prod(shape):
        raise TensorError(
            f"tables {list(rows.shape)} must come with positions {shape}, the position of each row"
        )
    dtype = dtype_of(next(array for name, array in arrays.items() if name in tables))
    dtype = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    rows = rows.reshape(-1, width)
    # pairs may be equal although each is listed once: those of two axes, and all at position 0
    if (
        rope is None
        or width != rope.num_pairs
        or (rope.axes.n_axes == 1 and np.any(rows != rows[:, :1]))
    ):
        rows = drop_repeats(rows)
    return rows, dtype


def vectors_of_rows(
    rows: Complex, dtype: str, rope: Rope, positions: NDArray[Any] | None
) -> Vectors:
    """Vectors whose pairs are all (1, 0), before and after a turn by rows ``[P, num_pairs]``."""
    places = np.arange(len(rows)) if positions is None else as_positions(positions)
    if places.size == len(rows):  # on whichever axis: every pair is turned by it
        places = places.reshape(-1, 1).repeat(rope.axes.n_axes, axis=1)
    tokens = _fit_positions(places, (1, len(rows)), rope.axes.n_axes)
    if tokens is None:
        shapes_given = f"{len(rows)} rows and positions {list(places.shape)}"
        raise TensorError(f"tables must have a row for each position, got {shapes_given}")
    if not np.isfinite(rows).all():
        raise TensorError("tables must be finite, got NaN or infinities")
    # before [1, P, 1, head_dim] each pair is 1 and 0, after that cos and sin
    (first, _), (to_first, to_second) = (
        (arrangement := arrangement_of(rope)).read,
        arrangement.written,
    )
    x, y = np.zeros(rope.head_dim), np.zeros((1, len(rows), 1, rope.head_dim))
    x[first], y[0, :, 0, to_first], y[0, :, 0, to_second] = 1, rows.real.T, rows.imag.T
    return Vectors("tables", "sd", np.broadcast_to(x, y.shape), y, tokens, dtype, is_table=True)
