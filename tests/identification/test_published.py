"""Programs that compute as those with a published defect do, and have none."""

from __future__ import annotations

import numpy as np

from phasor import Rope, preset, verify

from .published.programs import (
    angles_of,
    llama3,
    mscale,
    powers,
    recorded,
    turn_halves,
    turn_interleaved,
    vectors,
    yarn,
)


def test_learned_frequencies_that_a_program_ignores_are_told_by_their_pairs() -> None:
    """Mistral Large 4 multiplies them by ``exp(alpha)``, and its checkpoint has the alphas."""
    alphas = np.where(np.arange(32) < 5, 0, np.linspace(-0.5, 0.5, 32))
    learned = powers(64, 1e6).astype(np.float64) * np.exp(alphas)
    rope = Rope(head_dim=64, pairing="half", explicit_inv_freq=tuple(learned.tolist()))
    x, tokens = vectors(300, 2, 64), np.arange(300)
    turned = turn_halves(x, angles_of(tokens, powers(64, 1e6)))
    found = verify(rope, recorded("q", x, turned, tokens))
    assert [change.sentence for change in found.sides[0].changes] == [
        "Frequencies differ from pair 5 on: pairs 5-31."
    ]


def test_programs_without_a_defect_rotate_as_they_should() -> None:
    """The arithmetic of the museum is right where it leaves nothing out."""
    x, tokens = vectors(2000, 2, 64), np.arange(2000)
    scaled = angles_of(tokens, yarn(64, 150_000.0, 32.0, 4096, truncate=False))
    made = {
        "gpt-oss-20b": turn_halves(x, scaled, mscale(32.0)),
        "llama-3.2-1b": turn_halves(x, angles_of(tokens, llama3(64, 500_000.0, 32.0))),
        "deepseek-v2-lite": turn_interleaved(x, angles_of(tokens, yarn(64, 1e4, 40.0, 4096))),
    }
    for name, turned in made.items():
        assert not verify(preset(name), recorded("k", x, turned, tokens)), name


def test_a_coarse_program_may_be_recorded_in_a_finer_dtype() -> None:
    """As ``.float()`` does of a model in bfloat16, and a list of a model in float32."""
    x, tokens = vectors(300, 2, 64), np.arange(300)
    rope = Rope(head_dim=64, pairing="half", base=5e5)
    turned = turn_halves(x, angles_of(tokens, powers(64, 5e5)))
    late = turn_halves(x, angles_of(tokens + 1, powers(64, 5e5)))
    for program, recorder in (("bfloat16", "float32"), ("float32", "float64")):
        before, right, wrong = (one.astype(program).astype(recorder) for one in (x, turned, late))
        assert not verify(rope, recorded("q", before, right, tokens))
        (side,) = verify(rope, recorded("q", before, wrong, tokens)).sides
        assert [change.name for change in side.changes] == ["offset"]
