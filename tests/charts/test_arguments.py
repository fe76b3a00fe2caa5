"""Arguments of charts that are of another kind than a chart takes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from phasor import PhasorError, Rope, charts, preset
from phasor.errors import SpecError

from .test_charts import CHARTS

ROPE = Rope(head_dim=128, pairing="half")
# what a chart is given by mistake, by how the annotation of the argument begins
WRONG: dict[str, list[Any]] = {
    "Rope": [{"mine": ROPE}, preset("llama-3-8b"), None, "half"],
    "Mapping": [ROPE, [ROPE], {"mine": preset("llama-3-8b")}, {"mine": None}, None],
    "Sequence": [256, None],
    "ArrayLike": [256, None],
    "LayerRopes": [ROPE, "llama-3-8b", None],
}


def mistakes() -> list[tuple[str, str, Any]]:
    """Every chart with every one of its arguments wrong."""
    return [
        (name, argument.name, wrong)
        for name in charts.__all__
        for argument in inspect.signature(getattr(charts, name)).parameters.values()
        for wrong in WRONG.get(str(argument.annotation).split("[")[0], ())
    ]


class Given(dict[str, Any]):
    """The arguments of the last call of a chart."""


def right(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments that the gallery gives to a chart."""
    if name == "report":
        return {"ropes": preset("llama-3-8b")}
    given = Given()
    signature = inspect.signature(getattr(charts, name))
    with monkeypatch.context() as patched:
        patched.setattr(
            charts, name, lambda *args, **kw: given.update(signature.bind(*args, **kw).arguments)
        )
        CHARTS[name]()
    return given


@pytest.mark.parametrize(("name", "argument", "wrong"), mistakes(), ids=lambda one: str(one)[:40])
def test_what_came_and_what_is_wanted_are_said(
    name: str, argument: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The argument's name comes first, in an error of phasor's."""
    given = right(name, monkeypatch) | {argument: wrong}
    with pytest.raises(PhasorError, match=f"^{argument} must"):
        getattr(charts, name)(**given)


def test_a_rope_and_a_number_are_told_the_way_out() -> None:
    """The first call that somebody tries, and the second."""
    with pytest.raises(SpecError, match=r"to its Rope, such as \{'mine': rope\}, got"):
        charts.decay_chart(ROPE, 256)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"such as range\(1, 257\), got 256"):
        charts.decay_chart({"mine": ROPE}, 256)
