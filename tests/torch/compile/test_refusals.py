"""What is refused is refused in the same words where a graph may not break."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from phasor.torch import rotate, rotate_, rotate_qk, rotate_qk_

from ..test_errors import BY_POSITIONS, BY_ROWS, OF_TWO, ROW, Refusal
from ..torch_arrays import normal
from ..torch_cases import HALF, turn, turn_

USUAL = {"positions": torch.arange(4), "rope": HALF}
VERBS = (
    (rotate, BY_POSITIONS, {"x": normal(4, 2, 8), **USUAL}),
    (rotate_, BY_POSITIONS, {"x": normal(4, 2, 8), **USUAL}),
    (rotate_qk, OF_TWO, {"q": normal(4, 3, 8), "k": normal(4, 2, 8), **USUAL}),
    (rotate_qk_, OF_TWO, {"q": normal(4, 3, 8), "k": normal(4, 2, 8), **USUAL}),
    (turn, BY_ROWS, {"x": normal(4, 2, 8), "cos": ROW, "sin": ROW, "pairing": "half"}),
    (turn_, BY_ROWS, {"x": normal(4, 2, 8), "cos": ROW, "sin": ROW, "pairing": "half"}),
)
# what the compiler refuses before phasor is asked, and values that no compiler reads
NOT_ASKED = (
    *("got torch.sparse_coo", "must be an array of numbers", "must fit 64 bits"),
    *("positions must be finite", "got tensor(2., requires_grad=True)"),
    "got torch._mkldnn",  # which a compiler's fake tensor takes for strided
)


def cases() -> Iterator[Any]:
    """Every verb with each of its refusals."""
    for verb, refusals, usual in VERBS:
        for refusal in refusals:
            if not any(words in refusal.text for words in NOT_ASKED):
                yield pytest.param(verb, refusal, usual, id=f"{verb.__name__}: {refusal.text}")


@pytest.mark.parametrize(("verb", "refusal", "usual"), list(cases()))
def test_a_refusal_keeps_its_text_in_a_full_graph(
    verb: Callable[..., Any], refusal: Refusal, usual: dict[str, Any]
) -> None:
    """Whatever class the compiler raises."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda given: verb(**given), fullgraph=True, backend="eager")
    with pytest.raises(Exception) as raised:  # noqa: PT011
        compiled(usual | refusal.changed)
    assert refusal.text in str(raised.value)
