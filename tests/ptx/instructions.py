"""What instructions do to threads: `PERFORM`, by their form, else `compute`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .arithmetic import COMPARED, OPERATIONS, TYPES, canonical, convert, pack, shifted
from .memory import AccessError, check_boundaries
from .program import Instruction
from .threads import WARP, Threads

# -- registers ------------------------------------------------------------------------------------


def move(t: Threads, given: Instruction, active: NDArray) -> None:
    """Between registers, or a register and its parts, of which the first is the lowest."""
    target, source = given.operands
    kind = given.name[-1]
    if isinstance(source, tuple):
        parts = [t.value(each, _part(kind, source)) for each in source]
        t.keep(target, np.stack(parts, -1).view(TYPES[kind])[:, 0], active)
    elif isinstance(target, tuple):
        whole = np.ascontiguousarray(t.value(source, kind))[:, None]
        parts = whole.view(TYPES[_part(kind, target)])
        for i, each in enumerate(target):
            t.keep(each, parts[:, i], active)
    else:
        t.keep(target, t.value(source, kind), active)


def _part(kind: str, parts: tuple[str, ...]) -> str:
    return f"b{int(kind[1:]) // len(parts)}"


def multiply(t: Threads, given: Instruction, active: NDArray) -> None:
    """The lower half of a product of integers, the upper of 32 bits, or, ``wide``, all of it.

    ``mad`` adds to that.
    """
    kind, half = given.name[-1], given.name[1]
    a, b = (t.value(each, kind) for each in given.operands[1:3])
    if half != "lo":
        wide = f"{kind[0]}{2 * int(kind[1:])}"
        a, b = a.astype(TYPES[wide]), b.astype(TYPES[wide])
        kind = wide if half == "wide" else kind
    value = a * b
    if half == "hi":
        value = (value >> value.dtype.type(32)).astype(TYPES[kind])
    if given.name[0] == "mad":
        value = value + t.value(given.operands[3], kind)
    t.keep(given.operands[0], value, active)


def shift(t: Threads, given: Instruction, active: NDArray) -> None:
    """By a number of 32 bits, whatever is shifted."""
    target, x, by = given.operands
    left = given.name[0] == "shl"
    t.keep(target, shifted(t.value(x, given.name[-1]), t.value(by, "u32"), left=left), active)


def extract(t: Threads, given: Instruction, active: NDArray) -> None:
    """``length`` bits from ``start`` on, of a signed number with their sign."""
    target, x, start, length = given.operands
    number, many = t.value(x, given.name[-1]), t.value(length, "u32")
    above = 8 * number.itemsize - t.value(start, "u32") - many
    top = shifted(number, above, left=True)
    t.keep(target, shifted(top, 8 * number.itemsize - many, left=False), active)


def select(t: Threads, given: Instruction, active: NDArray) -> None:
    """One of two, as a predicate says."""
    target, yes, no, which = given.operands
    kind = given.name[-1]
    chosen = np.where(t.value(which, "pred"), t.value(yes, kind), t.value(no, kind))
    t.keep(target, chosen, active)


def compare(t: Threads, given: Instruction, active: NDArray) -> None:
    """Of two numbers. With NaN only ``nan`` holds, and what is unordered and ends in u."""
    how, kind = given.name[1], given.name[-1]
    a, b = (t.value(each, kind) for each in given.operands[1:])
    unordered = (a != a) | (b != b)
    if how == "nan":
        holds = unordered
    elif how in COMPARED:
        holds = COMPARED[how](a, b) & ~unordered
    else:
        holds = COMPARED[how.removesuffix("u")](a, b) | unordered
    t.keep(given.operands[0], holds, active)


def change(t: Threads, given: Instruction, active: NDArray) -> None:
    """Of one number, which may be rounded down or towards zero, or two that share a register."""
    target, source = given.kinds
    values = [t.value(each, source) for each in given.operands[1:]]
    if given.form in _TO_INTEGERS:
        values = [_TO_INTEGERS[given.form](each) for each in values]
    value = convert(target, source, *values) if len(values) == 1 else pack(target, *values)
    t.keep(given.operands[0], value, active)


def compute(t: Threads, given: Instruction, active: NDArray) -> None:
    """Anything of `OPERATIONS`, on numbers of the kind that the name ends in."""
    operation = OPERATIONS[given.form]
    target, *sources = given.operands
    if given.kinds == ["f32x2"]:
        pairs = [np.ascontiguousarray(t.value(each, "b64"))[:, None] for each in sources]
        both = canonical(operation(*(pair.view(np.float32) for pair in pairs)))
        t.keep(target, np.ascontiguousarray(both).view(np.uint64)[:, 0], active)
        return
    *wide, kind = given.kinds
    if wide:
        # the factors are narrower than the rest
        assert given.form == "fma.rn", given
        factors = [convert(wide[0], kind, t.value(each, kind)) for each in sources[:2]]
        values = [*factors, t.value(sources[2], wide[0])]
    else:
        values = [t.value(each, kind) for each in sources]
    t.keep(target, canonical(operation(*values)), active)


# -- between lanes of a warp ----------------------------------------------------------------------


def shuffle(t: Threads, given: Instruction, active: NDArray) -> None:
    """Every lane of a warp reads another one's register."""
    _check_whole_warps(active)
    target, source, lane = given.operands[:3]
    own, asked = t.lane % WARP, t.value(lane, "u32")
    other = own ^ asked if given.name[2] == "bfly" else asked % WARP
    t.keep(target, t.value(source, "b32")[t.lane - own + other], active)


def load_matrices(t: Threads, given: Instruction, active: NDArray) -> None:
    """8 by 8 numbers of 16 bits: lane ``4 r + c`` gets columns 2c and 2c + 1 of row r."""
    targets, operand = given.operands
    warps, at = _rows_of_matrices(t, given, operand, active)
    found = t.shared[warps, at].view(np.uint16).reshape(-1, len(targets), 8, 8)
    if "trans" in given.name:
        found = np.ascontiguousarray(found.swapaxes(-1, -2))
    held = found.view(np.uint32)
    for i, target in enumerate(targets):
        value = np.zeros(t.count, np.uint32)
        value[active] = held[:, i].ravel()
        t.keep(target, value, active)


def store_matrices(t: Threads, given: Instruction, active: NDArray) -> None:
    """The other way round."""
    operand, sources = given.operands
    warps, at = _rows_of_matrices(t, given, operand, active)
    held = [t.value(each, "b32")[active].reshape(-1, 8, 4) for each in sources]
    numbers = np.stack(held, 1).view(np.uint16)
    if "trans" in given.name:
        numbers = np.ascontiguousarray(numbers.swapaxes(-1, -2))
    t.shared[warps, at] = numbers.view(np.uint8).reshape(-1, 16)


def _rows_of_matrices(
    t: Threads, given: Instruction, operand: str, active: NDArray
) -> tuple[NDArray, NDArray]:
    """The block and the places of 16 bytes; lane ``8 i + r`` has the address of row r of i."""
    _check_whole_warps(active)
    many = 8 * int(given.name[4].removeprefix("x"))
    lanes = np.flatnonzero(active).reshape(-1, WARP)[:, :many].ravel()
    return _shared(t, lanes, t.address(operand, "u32")[lanes], 16)


def _check_whole_warps(active: NDArray) -> None:
    warps = active.reshape(-1, WARP)
    if np.any(warps.any(1) != warps.all(1)):
        raise AccessError("lanes of a warp are missing")


# -- where to go next -----------------------------------------------------------------------------


def branch(t: Threads, given: Instruction, active: NDArray) -> None:
    """To a label."""
    t.at[active] = t.program.labels[given.operands[0]]


def leave(t: Threads, given: Instruction, active: NDArray) -> None:
    """For good."""
    t.at[active] = len(t.program.instructions)


def meet(t: Threads, given: Instruction, active: NDArray) -> None:
    """Threads wait until all of their block do which have not left: there is one barrier."""
    left = t.at == len(t.program.instructions)
    _check_whole_warps(active | left)
    if given.form == "bar.warp.sync":
        return
    assert given.operands == ("0",), given
    t.waits |= active
    met = (t.waits | left).reshape(len(t.barriers), -1).all(1)
    t.barriers[met] += 1
    t.waits &= ~met[t.block]


# -- memory ---------------------------------------------------------------------------------------


def load(t: Threads, given: Instruction, active: NDArray) -> None:
    """One number, or several that lie in a row, of a tensor, of shared memory, or an argument."""
    targets = given.operands[0]
    targets = targets if isinstance(targets, tuple) else (targets,)
    kind, lanes = np.dtype(TYPES[given.name[-1]]), np.flatnonzero(active)
    size, where = kind.itemsize * len(targets), given.name[1]
    address = t.address(given.operands[1], "u32" if where == "shared" else "u64")[lanes]
    if where == "param":
        found = t.arguments[address.astype(np.int64)[:, None] + np.arange(size)]
    elif where == "shared":
        found = t.shared[_shared(t, lanes, address, size)]
    else:
        found = t.memory.load(address, size, t.thread[lanes], t.epoch(lanes))
    for target, numbers in zip(targets, found.view(kind).T, strict=True):
        value = np.zeros(t.count, kind)
        value[lanes] = numbers
        t.keep(target, value, active)


def store(t: Threads, given: Instruction, active: NDArray) -> None:
    """The other way round."""
    sources = given.operands[1]
    sources = sources if isinstance(sources, tuple) else (sources,)
    lanes, where = np.flatnonzero(active), given.name[1]
    numbers = np.stack([t.value(each, given.name[-1])[lanes] for each in sources], -1)
    values = numbers.view(np.uint8)
    if where == "shared":
        address = t.address(given.operands[0], "u32")[lanes]
        t.shared[_shared(t, lanes, address, values.shape[1])] = values
    else:
        address = t.address(given.operands[0], "u64")[lanes]
        t.memory.store(address, values, t.thread[lanes], t.epoch(lanes))


def _shared(t: Threads, lanes: NDArray, address: NDArray, size: int) -> tuple[NDArray, NDArray]:
    """Where ``size`` bytes of every lane lie in the shared memory of all blocks."""
    check_boundaries(address, size)
    at = address.astype(np.int64)[:, None] + np.arange(size)
    if np.any(at >= t.shared.shape[1]):
        raise AccessError("an address outside the shared memory")
    return t.block[lanes][:, None], at


_TO_INTEGERS = {"cvt.rmi": np.floor, "cvt.rzi": np.trunc}
_MATRICES = "sync.aligned.m8n8"
#: By form: what is neither here nor in `OPERATIONS` is not known, and a KeyError.
PERFORM: dict[str, Callable[[Threads, Instruction, NDArray], None]] = {
    "mov": move,
    **dict.fromkeys(("mul.lo", "mul.hi", "mul.wide", "mad.lo", "mad.wide"), multiply),
    **dict.fromkeys(("shl", "shr"), shift),
    "bfe": extract,
    "selp": select,
    **dict.fromkeys((f"setp.{how}{u}" for how in COMPARED for u in ("", "u")), compare),
    "setp.nan": compare,
    **dict.fromkeys(("cvt", "cvt.rn", *_TO_INTEGERS), change),
    **dict.fromkeys(("shfl.sync.bfly", "shfl.sync.idx"), shuffle),
    **dict.fromkeys((f"ldmatrix.{_MATRICES}{t}.shared" for t in ("", ".trans")), load_matrices),
    **dict.fromkeys((f"stmatrix.{_MATRICES}{t}.shared" for t in ("", ".trans")), store_matrices),
    **dict.fromkeys(("bra", "bra.uni"), branch),
    "ret": leave,
    **dict.fromkeys(("bar.sync", "bar.warp.sync"), meet),
    **dict.fromkeys(("ld.param", "ld.global", "ld.shared"), load),
    **dict.fromkeys(("st.global", "st.shared"), store),
}
