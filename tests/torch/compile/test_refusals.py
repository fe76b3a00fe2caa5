"""What is refused is refused in the same words where a graph may not break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from phasor.torch import rotate, rotate_, rotate_by, rotate_by_, rotate_qk, rotate_qk_

from ..test_errors import BY_POSITIONS, BY_ROWS, OF_TWO, ROW, Refusal
from ..torch_cases import HALF
from ..torch_oracle import normal

USUAL = {"positions": torch.arange(4), "rope": HALF}
VERBS: dict[Callable[..., Any], tuple[dict[str, Refusal], dict[str, Any]]] = {
    **{verb: (BY_POSITIONS, {"x": normal(4, 2, 8), **USUAL}) for verb in (rotate, rotate_)},
    **{
        verb: (
            OF_TWO,
            {
                "q": normal(4, 3, 8),
                "k": normal(4, 2, 8),
                "positions": torch.arange(4),
                "rope": HALF,
            },
        )
        for verb in (rotate_qk, rotate_qk_)
    },
    **{
        verb: (BY_ROWS, {"x": normal(4, 2, 8), "cos": ROW, "sin": ROW, "pairing": "half"})
        for verb in (rotate_by, rotate_by_)
    },
}


# what the compiler refuses before phasor is asked, and values that no compiler reads
NOT_ASKED = {
    *(f"{name}: sparse" for name in ("x", "q", "k", "positions")),
    *(f"positions: {value}" for value in ("words", "nothing", "ragged", "beyond int64")),
    *(f"positions: {value}" for value in ("one beyond int64", "NaN", "infinite", "off the scale")),
    "gain: learned",
}


@pytest.mark.parametrize(
    ("verb", "case"),
    [(verb, case) for verb, (cases, _) in VERBS.items() for case in cases if case not in NOT_ASKED],
)
def test_a_refusal_keeps_its_text_in_a_full_graph(verb: Callable[..., Any], case: str) -> None:
    """Whatever class the compiler raises."""
    cases, usual = VERBS[verb]
    torch._dynamo.reset()
    compiled = torch.compile(lambda given: verb(**given), fullgraph=True, backend="eager")
    with pytest.raises(Exception) as raised:  # noqa: PT011
        compiled(usual | cases[case].changed)
    assert cases[case].text in str(raised.value)
