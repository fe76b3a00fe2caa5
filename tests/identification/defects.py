"""Programs with one defect each: planted ones in plain NumPy, and those that programs had.

`DEFECTS` are functions, `PUBLISHED` are done again as their programs did them; `PARTS` has both for
every door.
"""

from __future__ import annotations

import inspect

import numpy as np

from phasor import Rope
from phasor.scaling import Llama3

from .published import frequencies, layouts
from .published import positions as counted
from .published.programs import Defect, Part

WIDTH = 32
PAIRS = WIDTH // 2
BASE = 10_000.0
STEPS = BASE ** (-np.arange(PAIRS) / PAIRS)


def bfloat16(values):
    """The nearest number with eight significant bits, ties to even."""
    mantissa, exponent = np.frexp(np.asarray(values, dtype=np.float64))
    return np.ldexp(np.rint(mantissa * 256) / 256, exponent)


def rotate_by_rows(x, cos, sin):
    """Halves turned by full-width rows, as most models write it."""
    first, second = np.split(x, 2, axis=-1)
    return (x * cos + np.concatenate([-second, first], -1) * sin).astype(x.dtype)


def rotate_halves(x, angles, gain=1.0):
    """The rotation of halves by angles ``[b, s, pairs]``."""
    both = np.concatenate([angles, angles], -1)[:, :, None]
    return rotate_by_rows(x, gain * np.cos(both), gain * np.sin(both))


def rotate(x, positions, steps=STEPS, gain=1.0):
    """The rotation without a defect."""
    return rotate_halves(x, positions[..., None] * steps, gain)


def rotate_some_pairs(x, positions, steps):
    """The first half of a head turned."""
    width = 2 * len(steps)
    return np.concatenate([rotate(x[..., :width], positions, steps), x[..., width:]], -1)


def from_table(rows, missing):
    """Positions looked up in a table; ``missing`` says what replaces a position beyond."""

    def turned(x, positions):
        return rotate(x, missing(positions, rows))

    return turned


def identity_beyond(x, positions):
    """Cos 1 and sin 0 beyond the table, as a masked load gives."""
    return np.where((positions < 1000)[..., None, None], rotate(x, positions), x)


def zeros_beyond(x, positions):
    """Nothing is written beyond the table."""
    return np.where((positions < 1000)[..., None, None], rotate(x, positions), 0 * x)


def nan_beyond(x, positions):
    """NaN beyond the table."""
    return np.where((positions < 1000)[..., None, None], rotate(x, positions), np.nan * x)


def raising(x, positions):
    """A table indexed as Python indexes."""
    table = np.arange(1000)[..., None] * STEPS
    return rotate_halves(x, table[positions])


def garbage(x, positions):
    """Rows of something else beyond the table."""
    return rotate(x, np.where(positions < 1000, positions, (positions * 7919 + 3) % 977))


def overwriting(x, positions):
    """In place, and returned."""
    x[...] = rotate(x, positions)
    return x


def float32_angles(x, positions):
    """Positions times frequencies in float32."""
    angles = positions[..., None].astype(np.float32) * STEPS.astype(np.float32)
    return rotate_halves(x, angles)


def rows_in_wrong_order(x, positions):
    """Each angle twice in a row, on halves."""
    both = np.repeat(positions[..., None] * STEPS, 2, axis=-1)[:, :, None]
    return rotate_by_rows(x, np.cos(both), np.sin(both))


def half_rows_on_interleaved(x, positions):
    """All angles and all again, on neighbours."""
    angles = positions[..., None] * STEPS
    both = np.concatenate([angles, angles], -1)[:, :, None]
    swapped = np.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
    return (x * np.cos(both) + swapped * np.sin(both)).astype(x.dtype)


def reflecting(x, positions):
    """One sign of four is wrong."""
    angles = (positions[..., None] * STEPS)[:, :, None]
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos + second * sin, first * sin - second * cos], -1)


def growing(x, positions):
    """The length depends on the position."""
    return rotate(x, positions) * (1.001 ** positions[..., None, None])


def inverted_ramp(x, positions):
    """Fast pairs divided, slow ones kept."""
    keep = 1 - np.clip((np.arange(PAIRS) - 3) / 8, 0, 1)
    return rotate(x, positions, keep * STEPS / 8 + (1 - keep) * STEPS)


class Remembering:
    """The longest call so far picks the frequencies, for ever."""

    def __init__(self):
        self.longest = 0

    def __call__(self, x, positions):
        """Turn."""
        self.longest = max(self.longest, positions.max() + 1)
        factor = max(self.longest / 512, 1.0)
        base = BASE * factor ** (PAIRS / (PAIRS - 1))
        return rotate(x, positions, base ** (-np.arange(PAIRS) / PAIRS))


def dynamic(x, positions):
    """Dynamic NTK by the length of this call alone."""
    factor = 4.0 * max(positions.max() + 1, 512) / 512 - 3.0
    base = BASE * factor ** (PAIRS / (PAIRS - 1))
    return rotate(x, positions, base ** (-np.arange(PAIRS) / PAIRS))


def dynamic_one_token_off(x, positions):
    """Dynamic NTK by the highest position, where the length is meant."""
    factor = 4.0 * max(positions.max(), 512) / 512 - 3.0
    base = BASE * factor ** (PAIRS / (PAIRS - 1))
    return rotate(x, positions, base ** (-np.arange(PAIRS) / PAIRS))


def llama3(steps, factor=8.0, length=2048):
    """Llama 3.1's law on these frequencies, between 1 and 4 turns of the context."""
    keep = np.clip((length * steps / (2 * np.pi) - 1) / 3, 0, 1)
    return (1 - keep) * steps / factor + keep * steps


def on_queries(q, k, positions):
    """The softmax factor of a law folded into the queries."""
    return rotate(q, positions, gain=1.87), rotate(k, positions)


def keys_backwards(q, k, positions):
    """Keys turned the other way."""
    return rotate(q, positions), rotate(k, -positions)


def keys_of_another_base(q, k, positions):
    """Keys with frequencies of their own."""
    return rotate(q, positions), rotate(k, positions, STEPS**1.1)


def rotate_nonlinearly(x, positions):
    """A soft clip, as attention logits have; vectors do not."""
    return np.tanh(rotate(x, positions))


DEFECTS = {
    "positions-in-bfloat16": lambda x, p: rotate(x, bfloat16(p)),
    "positions-in-float16": lambda x, p: rotate(x, p.astype(np.float16).astype(float)),
    "table-in-bfloat16": lambda x, p: rotate_by_rows(
        x, *(bfloat16(f(np.tile(p[..., None] * STEPS, 2)[:, :, None])) for f in (np.cos, np.sin))
    ),
    "table-in-float16": lambda x, p: rotate_by_rows(
        x,
        *(
            f(np.tile(p[..., None] * STEPS, 2)[:, :, None]).astype(np.float16)
            for f in (np.cos, np.sin)
        ),
    ),
    "frequencies-in-bfloat16": lambda x, p: rotate(x, p, bfloat16(STEPS)),
    "frequencies-in-float16": lambda x, p: rotate(x, p, STEPS.astype(np.float16).astype(float)),
    "frequencies-in-float32": lambda x, p: rotate(x, p, STEPS.astype(np.float32).astype(float)),
    "angles-in-float32": float32_angles,
    "angles-in-bfloat16": lambda x, p: rotate_halves(x, bfloat16(p[..., None] * STEPS)),
    "angles-in-float16": lambda x, p: rotate_halves(
        x, (p[..., None] * STEPS).astype(np.float16).astype(float)
    ),
    "table-end-identity": identity_beyond,
    "table-end-zeros": zeros_beyond,
    "table-end-nan": nan_beyond,
    "table-end-raises": raising,
    "table-end-garbage": garbage,
    "clamped": from_table(1000, lambda p, rows: np.minimum(p, rows - 1)),
    "wrapped": from_table(1000, lambda p, rows: p % rows),
    "negative-wraps": raising,
    "negative-unsigned": lambda x, p: rotate(x, np.abs(p)),
    "negative-clamped": lambda x, p: rotate(x, np.maximum(p, 0)),
    "ramp-inverted": inverted_ramp,
    "direction": lambda x, p: rotate(x, -p),
    "interleaved-rows-on-halves": rows_in_wrong_order,
    "half-rows-on-interleaved": half_rows_on_interleaved,
    "reflection": reflecting,
    "offset": lambda x, p: rotate(x, p + 1),
    "depends-on-length": dynamic,
    "length-off-by-one": dynamic_one_token_off,
    "law-twice": lambda x, p: rotate(x, p, llama3(llama3(STEPS))),
    "remembers": Remembering(),
    "inputs-written": overwriting,
    "index-from-one": lambda x, p: rotate(x, p, BASE ** (-(np.arange(PAIRS) + 1) / PAIRS)),
    "exponent-width": lambda x, p: rotate_some_pairs(x, p, 5e5 ** (-np.arange(PAIRS // 2) / PAIRS)),
    "stretch-on-frequencies": lambda x, p: rotate(x, p, STEPS / 8 ** (PAIRS / (PAIRS - 1))),
    "factor-on-one-side": on_queries,
    "keys-turn-backwards": keys_backwards,
    "queries-and-keys-differ": keys_of_another_base,
    "norm-varies": growing,
}
# what is true beside the defect, and would be wrong to hide
BESIDE = {
    "negative-wraps": {"table-end-raises"},
    "table-end-raises": {"negative-wraps"},
    "remembers": {"depends-on-length"},
    "length-off-by-one": {"depends-on-length"},
    "wrapped": {"negative-wraps"},
    "positions-in-float16": {"table-end-nan"},  # beyond 65504 they are infinite
}
PLAIN = Rope(head_dim=WIDTH, pairing="half", base=BASE)
# where it is not the rotation without a defect
MEANT = {
    "half-rows-on-interleaved": Rope(head_dim=WIDTH, pairing="interleaved", base=BASE),
    "exponent-width": Rope(head_dim=WIDTH, pairing="half", base=5e5, rotary_dim=WIDTH // 2),
    "law-twice": Rope(
        head_dim=WIDTH, pairing="half", base=BASE,
        scaling=Llama3(factor=8.0, original_max_positions=2048),
    ),
}  # fmt: skip
# what is found on keys, and which frequencies they have
ON_KEYS = {"keys-turn-backwards", "queries-and-keys-differ"}
BESIDE_IN_A_RECORDING = {"queries-and-keys-differ": ("base",)}
# what vectors of one call do not show; one that raised was not recorded
NOT_RECORDED = {
    "table-end-raises", "depends-on-length", "length-off-by-one", "remembers", "inputs-written",
}  # fmt: skip

#: Published defects, by what a file of them is about.
PUBLISHED = {
    str(module.__doc__): [one for one in vars(module).values() if isinstance(one, Defect)]
    for module in (frequencies, layouts, counted)
}


def planted(name):
    """The function with a defect, which no other test has called."""
    return Remembering() if name == "remembers" else DEFECTS[name]


def part_of(name):
    """A planted defect, with queries and keys of one call beyond each table or below 0."""
    function, recording = planted(name), {}
    side = "k" if name in ON_KEYS else "q"
    if name not in NOT_RECORDED:
        at = np.arange(-40, 500) if name.startswith("negative") else np.arange(2100)
        x = np.random.default_rng(0).standard_normal((1, len(at), 2, WIDTH)).astype(np.float32)
        vectors = [x.copy() for _ in inspect.signature(function).parameters][1:]
        turned = function(*vectors, at[None])
        recording = {"positions": at}
        for letter, y in zip("qk", turned if len(vectors) == 2 else [turned], strict=False):
            recording |= {letter: x, f"{letter}_rotated": np.float32(y)}
    return Part(MEANT.get(name, PLAIN), recording, {side: (name,)}, turns={side: planted(name)})


#: What makes the recordings and functions of every defect, by its name.
PARTS = {name: lambda name=name: [part_of(name)] for name in DEFECTS}
PARTS |= {one.name: one.replay for group in PUBLISHED.values() for one in group}
