"""Every defect has one name at every door where its evidence shows it."""

from __future__ import annotations

import re

import ml_dtypes
import pytest

from phasor import Rope, diff, identify, verify
from phasor.describe import static_rope

from .defects import BESIDE, BESIDE_IN_A_RECORDING, DEFECTS, PARTS, PUBLISHED

# in which programs with a published defect compute, and which are no difference from a model
FLOAT32 = {"angles-in-float32", "frequencies-in-float32"}


def arithmetic(name):
    """What is found of a program's arithmetic beside its defect."""
    return set() if name in DEFECTS else FLOAT32


def beside(names):
    """What is true beside these defects where a function is asked."""
    return set().union(*(BESIDE.get(name, set()) for name in names))


def functions(part):
    """The function of each side, the rope that it was meant to be, and the names of what it is."""
    model = part.rope()
    for side, turn in part.turns.items():
        layer = re.match(r"layers\.(\d+)\.", side)
        rope = model if isinstance(model, Rope) else model[int(layer[1]) if layer else 0]
        at = part.recording.get(f"{layer[0] if layer else ''}positions")
        rope = static_rope(rope, part.seq_len or (1 if at is None else int(at.max()) + 1))
        # a program for text has no positions on several axes
        if rope.axes.n_axes == 1 or at.ndim > 2:
            label = side if layer is None else f"layer {layer[1]}, {side[-1]}"
            yield turn, rope, {*part.changes.get(label, ())}


def ask_identify(name, part):
    """Where nothing is expected, what could have been meant is no finding."""
    for turn, rope, names in functions(part):
        found = identify(turn, rope.head_dim, n_axes=rope.axes.n_axes).names()
        expected = names & DEFECTS.keys()
        assert found - arithmetic(name) == expected | beside(expected)


def ask_diff(name, part):
    """A rope that is compared has no rule, and 65520 is beyond the context."""
    for turn, rope, names in functions(part):
        found = diff(rope, turn, context=4096)
        causes = () if found is None else found.causes
        said = {cause.name for cause in causes} - arithmetic(name)
        expected = {"frequencies" if one == "length" else one for one in names}
        assert said == expected | (beside(expected) - {"table-end-nan"}), str(found)
        assert not causes or found.lines()[0] == causes[0].sentence


def ask_verify(name, part):
    """The names by side, and the sentences; a recording in bfloat16 has the same names."""
    if not part.recording:
        return
    dims = "bshd" if name in DEFECTS else None
    expected = dict(part.changes)
    for side in expected:
        expected[side] = (*BESIDE_IN_A_RECORDING.get(name, ()), *expected[side])
    found = verify(part.rope(), part.recording, dims=dims, seq_len=part.seq_len)
    assert said_of_sides(found, arithmetic(name)) == expected, str(found)
    assert bool(found) == any({*names} - FLOAT32 for names in expected.values())
    if name not in DEFECTS:
        sentences = [change.sentence for side in found.sides for change in side.changes]
        assert tuple(dict.fromkeys(sentences)) == part.says, str(found)
        coarse = {
            key: value if key.endswith("positions") else value.astype(ml_dtypes.bfloat16)
            for key, value in part.recording.items()
        }
        found = verify(part.rope(), coarse, seq_len=part.seq_len)
        assert said_of_sides(found, FLOAT32) == expected, str(found)


def said_of_sides(found, ignored):
    """The names of changes and roundings by side."""
    said = {
        side.name: tuple(
            one.name for one in side.changes + side.roundings if one.name not in ignored
        )
        for side in found.sides
    }
    return {side: names for side, names in said.items() if names}


DOORS = {"identify": ask_identify, "diff": ask_diff, "verify": ask_verify}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in DEFECTS else [pytest.mark.slow]) for n in PARTS]
)
def test_a_defect_has_one_name_at_every_door(name, door):
    """That one and no other; and what is true beside it."""
    for part in PARTS[name]():
        DOORS[door](name, part)


def test_every_published_defect_has_a_thread_and_sentences():
    """A link, and sentences that end."""
    for group in PUBLISHED.values():
        for one in group:
            assert one.thread.startswith("https://github.com/")
            assert one.symptom.endswith(".")
            assert one.cause.endswith(".")


def test_no_two_defects_have_one_name():
    """The table would have one of them alone."""
    names = [one.name for group in PUBLISHED.values() for one in group]
    assert len(PARTS) == len(DEFECTS) + len(names)
