"""A new law, layout, backend or attention option is missed nowhere: each test names the place.

The lists themselves, with what to write in each place, are in CONTRIBUTING.md.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from phasor.axes import AXES, OneAxis
from phasor.configs.writing import WITHOUT_ROPE_TYPE, WRITERS
from phasor.identification.explaining import LAYOUTS
from phasor.identification.laws import SCANS
from phasor.scaling import LAWS
from phasor.torch import RotaryAttention, rotate
from phasor.torch.ops import BACKENDS

from . import oracle, strategies

DOCS = Path(__file__).parent.parent / "docs"


def page(name: str) -> str:
    """A page's text."""
    return (DOCS / name).read_text("utf-8")


@pytest.mark.parametrize("name", LAWS)
def test_a_law_is_in_every_place(name: str) -> None:
    """Its formula, its writer, its search, its row and its draw."""
    law = LAWS[name]
    places = {
        "tests/oracle.py LAWS": not hasattr(law, "apply") or law.__name__ in oracle.LAWS,
        "tests/strategies.py EVERY_LAW": name in strategies.EVERY_LAW,
        "configs/writing.py WRITERS or WITHOUT_ROPE_TYPE": (law in WRITERS)
        != (law in WITHOUT_ROPE_TYPE),
        "identification/laws.py SCANS": name in SCANS,
        "docs/laws.md": f"[`{law.__name__}`]" in page("laws.md") and f"`{name}`" in page("laws.md"),
    }
    assert [place for place, there in places.items() if not there] == []


@pytest.mark.parametrize("name", AXES)
def test_a_layout_of_axes_is_in_every_place(name: str) -> None:
    """What looks for it, how `phasor show` describes it, and its row."""
    layout = AXES[name]
    places = {
        "axes.py summary": bool(getattr(layout, "summary", "")),
        "identification/explaining.py LAYOUTS": layout is OneAxis or name in LAYOUTS,
        "docs/conventions.md": f"`{layout.__name__}`" in page("conventions.md"),
    }
    assert [place for place, there in places.items() if not there] == []


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_documented(name: str) -> None:
    """Where it is chosen."""
    assert f'``"{name}"``' in str(rotate.__doc__)


def test_every_option_of_attention_is_documented() -> None:
    """With what it does."""
    options = list(inspect.signature(RotaryAttention).parameters)
    text = str(RotaryAttention.__doc__)
    assert [name for name in options if f"\n        {name}: " not in text] == []
