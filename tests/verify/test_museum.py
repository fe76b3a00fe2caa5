"""Published defects, done again as their programs did them, are named."""

from __future__ import annotations

import pytest

from phasor import verify

from .defects import frequencies, layouts, positions
from .defects.museum import DEFECTS, Defect

MODULES = (frequencies, layouts, positions)


@pytest.mark.parametrize("defect", DEFECTS, ids=[one.name for one in DEFECTS])
def test_a_published_defect_is_named(defect: Defect) -> None:
    """Which sides differ, by which names, in which words; and the recording is otherwise right."""
    for part in defect.replay():
        found = verify(part.rope(), part.recording, seq_len=part.seq_len)
        changes = {
            side.name: tuple(one.name for one in side.changes) for side in found.sides if side
        }
        assert changes == part.changes, str(found)
        lines = [line.strip() for line in str(found).splitlines()]
        assert [text for text in part.says if text not in lines] == [], str(found)


def test_every_defect_has_a_thread_of_its_own_words() -> None:
    """A link, and sentences that end."""
    assert len(DEFECTS) >= 14
    for one in DEFECTS:
        assert one.thread.startswith("https://github.com/")
        assert one.symptom.endswith(".") and one.cause.endswith(".")
