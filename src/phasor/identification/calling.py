"""Call a foreign rotation, whatever arrays, dimensions and positions it takes.

`find_caller` tries the possible ways. `Caller.turn` then hides which one works: vectors and
positions in, float64 results out.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from phasor._checks import choice
from phasor.errors import BackendError, SpecError, TensorError, install_hint
from phasor.identification.spectrum import ROUNDING, Floats, near_powers_of_two

_DIMS = ("bhsd", "bshd", "shd", "hsd", "bsd", "sd", "sbhd")
# orders of the dimensions of positions (b batch, s sequence, n axes), for one axis and for several
_POSITION_DIMS = {False: ("bs", "s"), True: ("bsn", "nbs", "sn", "ns")}
_VECTORS = ("x", "q", "k")
_LIBRARIES = ("numpy", "torch", "jax")
_WORDS = (*_VECTORS, "positions", "offset", "cos", "sin", "rows")
# the word for an argument, by the argument's name
_NAMES = {
    "q": ("q", "xq", "query", "queries", "query_states", "q_embed", "q_pe", "q_rot"),
    "k": ("k", "xk", "key", "keys", "key_states", "k_embed", "k_pe", "k_rot"),
    "positions": ("positions", "position_ids", "pos_ids", "input_pos", "input_positions"),
    "offset": ("offset", "start_pos", "position_offset", "seqlen_offset", "seqlen_offsets"),
    "cos": ("cos", "cos_cached", "cos_cache", "cos_emb", "freqs_cos", "cos_freqs"),
    "sin": ("sin", "sin_cached", "sin_cache", "sin_emb", "freqs_sin", "sin_freqs"),
    "rows": (
        "freqs_cis",
        "freqs",
        "rope_cache",
        "rotary_pos_emb",
        "cos_sin",
        "cos_sin_cache",
        "position_embeddings",
        "rotary_emb",
        "image_rotary_emb",
        "freqs_complex",
        "pos_emb",
    ),
}
_WORD_OF = {name: word for word, names in _NAMES.items() for name in names}
_TABLE_WORDS = {"cos", "sin", "rows"}
# coprime, so that a tensor with tokens and heads exchanged does not broadcast by accident
_HEADS, _TOKENS = 3, 5
# the longest call of a function that takes no positions, or that looks rows up in a table: such a
# call computes every token or row from 0 on
_LONGEST_CALL = 1 << 12


class Calling(NamedTuple):
    """How a function is called, as in `identify`; where a field is None, each choice is tried."""

    table: Callable[..., Any] | None = None  # makes its cos and sin from positions
    takes: str | None = None
    dims: str | None = None
    arrays: str | None = None
    dtype: str = "float32"
    n_axes: int = 1  # coordinates of a position


class Arrays:
    """NumPy's arrays, JAX's or torch's in one dtype."""

    def __init__(self, name: str, dtype: str) -> None:
        if name == "numpy" and dtype == "bfloat16":
            raise BackendError('NumPy has no bfloat16; give arrays="torch" or "jax", or float32')
        try:
            self.library: Any = import_module("jax.numpy" if name == "jax" else name)
        except ImportError:
            way_out = install_hint("torch") if name == "torch" else f"pip install {name}"
            raise BackendError(
                f'arrays="{name}" needs {name}, which is not installed: {way_out}'
            ) from None
        self.name, self.dtype = name, dtype

    def make(self, values: NDArray[Any], dtype: str | None = None) -> Any:
        """A new array of these values, in their own dtype unless another is given."""
        if self.name != "torch":
            return self.library.asarray(values.copy(), dtype=dtype)
        tensor = self.library.from_numpy(values.copy())
        return tensor if dtype is None else tensor.to(getattr(self.library, dtype))

    def read(self, value: Any) -> Floats:
        """An array of the library as float64, copied."""
        if self.name != "torch" or not isinstance(value, self.library.Tensor):
            return np.array(value).astype(np.float64)
        values: Any = value.detach()
        values = self.library.view_as_real(values) if values.is_complex() else values
        return values.to("cpu", self.library.float64, copy=True).numpy()

    def dtype_of(self, value: Any) -> str:
        """The dtype of an array of the library, by name."""
        dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
        return "float64" if dtype == np.longdouble else str(dtype).rpartition(".")[2]

    def quiet_context(self) -> AbstractContextManager[Any]:
        """A context without warnings of overflow, and without recording for a backward pass."""
        return self.library.no_grad() if self.name == "torch" else np.errstate(all="ignore")


def _find_parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """A function's parameters; None if Python does not know them."""
    try:
        # a module's __call__ takes *args; its parameters are those of forward
        return list(inspect.signature(getattr(function, "forward", function)).parameters.values())
    except (TypeError, ValueError):
        return None


def _count_required(parameters: list[inspect.Parameter]) -> int:
    """How many positional arguments a call must give."""
    # kinds 0 and 1 may be given by position
    return sum(p.default is p.empty and p.kind in (0, 1) for p in parameters)


def _guess_arguments(function: Callable[..., Any], table: Callable[..., Any] | None) -> list[str]:
    """Possible values of ``takes`` for a function with these required arguments."""
    guesses = ["q k positions", "x positions", "x"]
    if table is not None:
        guesses = ["q k cos sin", "q k rows", "x cos sin", "x rows"]
    parameters = _find_parameters(function)
    if parameters is None or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return guesses
    required = [p.name for p in parameters if p.default is p.empty and p.kind in (0, 1)]
    rows = [name for name in required if _WORD_OF.get(name) in _TABLE_WORDS]
    if rows and table is None:
        raise SpecError(
            f"function takes {', '.join(rows)}, which only its own program makes: give table "
            "(--table), a function that makes them from positions, such as "
            "lambda p: freqs_cis[p] or LlamaRotaryEmbedding(config)"
        )
    if likeliest := _guess_by_names(required):
        return [likeliest, *(guess for guess in guesses if len(guess.split()) == len(required))]
    num_required = len(required)
    if table is None and num_required == 1:
        # positions may be optional, the only keyword or a second argument
        keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        keyword = [f"x {keywords[0]}=positions"] if len(keywords) == 1 else []
        has_second = sum(p.kind in (0, 1) for p in parameters) > 1
        return [*keyword, *(guesses[1:] if has_second else guesses[2:])]
    return [guess for guess in guesses if len(guess.split()) == num_required]


def _guess_by_names(required: list[str]) -> str:
    """``takes`` by the names of required arguments; empty if any but a vector's is unknown."""
    words = [_WORD_OF.get(name, "") for name in required]
    # vectors may have any name: a single vector is x, two are queries and keys
    vectors = {1: ["x"], 2: ["q", "k"]}.get(words.count(""), [])
    if vectors and not {"q", "k"} & {*words} and any(words):
        remaining = iter(vectors)
        words = [word or next(remaining) for word in words]
    words = ["x" if words.count("q") and not words.count("k") and w == "q" else w for w in words]
    return " ".join(words) if len(words) > 1 and all(words) and {"x", "q"} & {*words} else ""


def _check_takes(takes: str, table: Callable[..., Any] | None) -> None:
    words = {word.rpartition("=")[2] for word in takes.split()}
    if not words <= set(_WORDS) or not words & set(_VECTORS):
        raise SpecError(
            f'takes must list the arguments in order, such as "q k positions" or '
            f'"x input_pos=positions", of the words {", ".join(_WORDS)}; got {takes!r}'
        )
    if bool({"cos", "sin", "rows"} & words) != (table is not None):
        raise SpecError(
            f"takes {takes!r} and table must go together: table makes cos and sin, or rows, "
            f"from positions; got table={table!r}"
        )


class RefusedError(Exception):
    """The function raised an error (the cause), or its result cannot be that of a rotation."""


@dataclass(kw_only=True)
class Caller:
    """A foreign rotation behind one interface; `find_caller` makes it."""

    function: Callable[..., Any]
    table: Callable[..., Any] | None  # as in `Calling`
    arrays: Arrays
    takes: str  # its arguments in order, as for `identify`
    dims: str  # order of the dimensions of its vectors
    position_dims: str  # order of the dimensions of its positions
    head_dim: int
    n_axes: int  # coordinates of a position
    joined_heads: int = 1  # how many heads are joined into one head of width ``head_dim``
    # the words of ``takes`` whose arrays a call has changed
    changed_inputs: set[str] = field(default_factory=set[str])
    out_dtype: str = "float64"  # the dtype of its results

    def __post_init__(self) -> None:
        # pairs of a keyword (empty for a positional argument) and the word for its value
        self._arguments = [word.rpartition("=")[::2] for word in self.takes.split()]
        self._words = {word for _, word in self._arguments}
        self._takes_positions = not self._words <= set(_VECTORS)
        self._looks_up = "positions" in self._words and bool(self._words & _TABLE_WORDS)

    @property
    def rounding(self) -> float:
        """Relative rounding error of the results, by their dtype or the vectors', if coarser."""
        return max(ROUNDING[self.arrays.dtype], ROUNDING[self.out_dtype])

    @property
    def max_position(self) -> int:
        """The highest position to ask for: low where a call computes all positions below it too."""
        return _LONGEST_CALL if self._looks_up or not self._takes_positions else 1 << 62

    def record(self, max_position: int) -> dict[str, NDArray[Any]]:
        """A recording for `verify`, of random vectors at positions around every power of two."""
        positions = np.array(near_powers_of_two(min(max_position, self.max_position) + 1))
        if self.n_axes > 1:  # other coordinates on every axis: [P, n_axes]
            rolled = [np.roll(positions, 3 * axis) for axis in range(self.n_axes)]
            positions = np.stack(rolled, axis=-1)
        x = np.random.default_rng(0).standard_normal((4, self.head_dim))
        x = self.arrays.read(self.arrays.make(x, self.arrays.dtype))
        turned = self.turn(x, positions)  # [outputs, P, 4, head_dim]
        # results are exact to float64 only if the function was given float64
        kind = "float64" if self.rounding == ROUNDING["float64"] else "float32"
        recording: dict[str, NDArray[Any]] = {"positions": positions}
        for name, y in zip(("q", "k"), turned.astype(kind), strict=False):
            before = np.broadcast_to(x.astype(kind), y.shape)
            recording |= {name: before, f"{name}_rotated": y}
        return recording

    def turn(self, vectors: NDArray[Any], positions: Sequence[Any] | NDArray[Any]) -> Floats:
        """Every vector ``[m, head_dim]`` at every position: ``[outputs, P, m, head_dim]``."""
        positions = np.asarray(positions)
        if self.n_axes > 1 and positions.ndim == 1:  # the same position on every axis
            positions = np.repeat(positions[:, None], self.n_axes, axis=1)  # [P] to [P, n_axes]
        counts_from_0 = self._looks_up or not self._takes_positions
        is_beyond = positions.min(initial=0) < 0 or positions.max(initial=0) >= self.max_position
        if counts_from_0 and is_beyond:
            unit = "rows" if self._looks_up else "tokens"
            raise RefusedError(f"it takes no positions and counts {unit} from 0")
        if not self._takes_positions:
            return self._turn_tokens(vectors, np.arange(int(positions.max()) + 1))[:, positions]
        if "offset" in self._words:
            indices = range(len(positions))
            return np.concatenate([self._turn_tokens(vectors, positions[[i]]) for i in indices], 1)
        return self._turn_tokens(vectors, positions)

    def _turn_tokens(self, vectors: NDArray[Any], positions: NDArray[Any]) -> Floats:
        # vectors [m, d] become the heads of every token [P, m, d]; without heads, each needs a call
        has_no_heads = "h" not in self.dims or self.joined_heads > 1
        calls = vectors[:, None] if has_no_heads else [vectors]
        shape = len(positions), -1, self.head_dim // self.joined_heads
        outputs = [
            self._call(np.tile(heads, (len(positions), 1)).reshape(shape), positions)
            for heads in calls
        ]
        joined = (y.reshape(*y.shape[:2], -1, self.head_dim) for y in outputs)
        return np.concatenate([*joined], axis=2)

    def _call(self, tokens: NDArray[Any], positions: NDArray[Any]) -> Floats:
        """One call with ``tokens`` ``[s, h, d]`` at positions ``[s]`` or ``[s, n_axes]``."""
        with warnings.catch_warnings(), self.arrays.quiet_context():
            warnings.simplefilter("ignore")
            try:
                arguments = self._make_arguments(tokens, positions)
                values_before = {name: self.arrays.read(value) for name, value in arguments.items()}
                positional = [arguments[word] for name, word in self._arguments if not name]
                keywords = {name: arguments[word] for name, word in self._arguments if name}
                result = self.function(*positional, **keywords)
                vectors = [arguments[word] for word in _VECTORS if word in arguments]
                if result is None:  # it wrote its results to its inputs
                    result = vectors
                is_sequence = isinstance(result, (tuple, list))
                results = cast(Sequence[Any], result if is_sequence else [result])
                dtypes = [self.arrays.dtype_of(output) for output in results]
                if not set(dtypes) <= set(ROUNDING):
                    raise RefusedError(f"it returns {dtypes[0]}, and not {', '.join(ROUNDING)}")
                shape = tuple(vectors[0].shape)
                outputs = np.stack([self._unpack(self.arrays.read(y), shape) for y in results])
                self.out_dtype = dtypes[0]
            except RefusedError:
                raise
            # SystemExit too: a foreign sys.exit must not end this program
            except (Exception, SystemExit) as error:
                raise RefusedError(f"{type(error).__name__}: {error}") from error
        for name, value in values_before.items():
            if not np.array_equal(value, self.arrays.read(arguments[name]), equal_nan=True):
                self.changed_inputs.add(name)
        return outputs

    def _make_arguments(self, tokens: NDArray[Any], positions: NDArray[Any]) -> dict[str, Any]:
        """The values of the arguments, by the words of ``takes``."""
        order = self.dims.replace("b", "")
        # [s, h, d] in another order; [s, 1, d] to [s, d]
        vectors = np.einsum(f"shd->{order}", tokens) if "h" in order else tokens[:, 0]
        vectors = _add_batch(vectors, self.dims)
        # a separate array for each argument, because a function may write to it
        words = (word for word in _VECTORS if word in self._words)
        arguments = {word: self.arrays.make(vectors, self.arrays.dtype) for word in words}
        ordered = positions.T if self.position_dims in ("ns", "nbs") else positions
        library_positions = self.arrays.make(_add_batch(ordered, self.position_dims))
        if "positions" in self._words:
            arguments["positions"] = library_positions
        if "offset" in self._words:
            arguments["offset"] = int(positions[0])
        if self.table is not None:
            needs_only_positions = _count_required(_find_parameters(self.table) or []) == 1
            x = [] if needs_only_positions else [next(iter(arguments.values()))]
            rows = self.table(*x, self._positions_of_table(library_positions, positions))
            if "rows" in self._words:
                return arguments | {"rows": rows}
            arguments["cos"], arguments["sin"] = rows
        return arguments

    def _positions_of_table(self, call_positions: Any, positions: NDArray[Any]) -> Any:
        """The positions for the table: those of the call, or every position that it can look up."""
        if not self._looks_up:
            return call_positions
        every = np.arange(int(positions.max(initial=0)) + 1)
        return self.arrays.make(every[None] if "b" in self.position_dims else every)

    def _unpack(self, result: Floats, shape: tuple[int, ...]) -> Floats:
        """A result in the function's dims as ``[s, h, d]``."""
        if result.shape != shape:
            raise TensorError(f"of {list(shape)} it makes {list(result.shape)}")
        order = self.dims.replace("b", "")
        vectors = np.take(result, 0, self.dims.index("b")) if "b" in self.dims else result
        return np.einsum(f"{order}->shd", vectors) if "h" in order else vectors[:, None]


def _add_batch(array: NDArray[Any], dims: str) -> NDArray[Any]:
    """The array with a batch of one where ``dims`` have one."""
    if "b" not in dims:
        return array
    shape = [*array.shape]
    shape.insert(dims.index("b"), 1)
    return array.reshape(shape)


def find_caller(function: Callable[..., Any], head_dim: int, calling: Calling) -> Caller:
    """The first way of calling ``function`` that works and treats all heads alike."""
    for name, value in (("function", function), ("table", calling.table)):
        if isinstance(value, type):
            class_name = value.__name__
            raise SpecError(
                f"{name} must be an instance, and {class_name} is a class: give {class_name}(...)"
            )
    if not callable(function):
        raise SpecError(f"function must be callable, got {function!r}")
    choice("dtype", calling.dtype, ROUNDING)
    takes = calling.takes
    if calling.arrays is not None:
        choice("arrays", calling.arrays, _LIBRARIES)
    if calling.dims is not None:
        choice("dims", calling.dims, _DIMS)
    if takes is not None:
        _check_takes(takes, calling.table)
    guesses = _guess_arguments(function, calling.table) if takes is None else [takes]
    if not guesses:
        listed = ", ".join(parameter.name for parameter in _find_parameters(function) or [])
        raise TensorError(
            f"no way to call function({listed}) was found: state takes, what these arguments are, "
            'such as "q k positions", or wrap it in a lambda of (x, positions)'
        )
    refusals: list[tuple[bool, str]] = []
    idle: Caller | None = None  # the first that turns nothing: its order of dimensions may be wrong
    for joined_heads in (1, 2):
        for caller in _make_callers(function, head_dim, calling, guesses, joined_heads):
            try:
                turns_something = _check_caller(caller)
            except RefusedError as error:
                way = f"{caller.arrays.name} {caller.dims} ({caller.takes})"
                refusals.append((error.__cause__ is not None, f"{way}: {error}"))
                continue
            caller.changed_inputs.clear()
            if turns_something:
                return caller
            idle = idle or caller
        # heads are joined only if the heads of one call came out differently
        if idle is not None or not any("heads differ" in line for _, line in refusals):
            break
    if idle is not None:
        return idle
    # a refused result tells the reader more than an exception, so it comes first; a few distinct
    # refusals tell more than the same refusal many times
    distinct: dict[str, str] = {}
    for _, line in sorted(refusals, key=lambda refusal: refusal[0]):
        distinct.setdefault(line.partition(": ")[2][:40], line)
    texts = "; ".join(" ".join(line.split())[:160] for line in [*distinct.values()][:4])
    raise TensorError(
        f"no way to call function was found for head_dim {head_dim}; wrap it in a lambda of "
        f"(x, positions) or state takes, dims and arrays. Of {len(refusals)} tried: {texts}"
    )


def _make_callers(
    function: Callable[..., Any],
    head_dim: int,
    calling: Calling,
    guesses: list[str],
    joined_heads: int,
) -> Iterator[Caller]:
    """Every way to call the function, the likeliest first."""
    libraries = ("numpy", "torch") if calling.arrays is None else (calling.arrays,)
    for name in libraries:
        try:
            library = Arrays(name, calling.dtype)
        except BackendError:
            if calling.arrays is not None:
                raise
            continue
        orders = _DIMS if calling.dims is None else (calling.dims,)
        ways = product(guesses, orders, _POSITION_DIMS[calling.n_axes > 1])
        for guess, vector_dims, position_dims in ways:
            if joined_heads > 1 and "h" not in vector_dims:
                continue
            yield Caller(
                function=function, table=calling.table, arrays=library, takes=guess,
                dims=vector_dims, position_dims=position_dims, joined_heads=joined_heads,
                head_dim=joined_heads * head_dim, n_axes=calling.n_axes,
            )  # fmt: skip


def _check_caller(caller: Caller) -> bool:
    """Whether positions change the result; refuses a caller whose heads or equal calls differ."""
    # one vector for every head and token, so that equal positions give equal results
    vector = np.random.default_rng(0).standard_normal(caller.head_dim)
    positions = np.arange(_TOKENS)
    if caller.n_axes > 1:
        # unequal on all axes, so that exchanged axes and tokens are noticed
        positions = (positions[:, None] + 2 * np.arange(caller.n_axes)) % _TOKENS
    vectors = np.tile(vector, (_HEADS, 1))
    results = caller.turn(vectors, positions)
    reversed_results = caller.turn(vectors, positions[::-1])
    repeated = caller.turn(vectors, positions)
    if not np.isfinite(results).all():
        raise RefusedError(f"it gives {'NaN' if np.isnan(results).any() else 'infinity'}")
    room = 16 * caller.rounding * float(np.abs(results).max())

    def are_close(a: Floats, b: Floats) -> bool:
        return np.allclose(a, b, rtol=0, atol=room)

    if not are_close(repeated, results):
        raise RefusedError("equal calls differ: it is random, or remembers earlier calls")
    if not are_close(results, results[:, :, :1]):
        raise RefusedError("heads differ")
    if not are_close(reversed_results[:, ::-1], results):
        ignores_positions = are_close(reversed_results, results)
        reason = "it ignores positions, or remembers those of an earlier call"
        raise RefusedError(reason if ignores_positions else "tokens do not follow their positions")
    return not are_close(results, results[:, :1])
