"""Classes of diffusers that came after its last release here, by the formulas in their code."""

from __future__ import annotations

from typing import Any

import numpy as np

from phasor.files.reading import load

from ...each import each
from ..refusals import refused

JOY = {"hidden_size": 4096, "num_attention_heads": 32, "num_layers": 40, "theta": 10000}


@each("name", ["JoyImageEditTransformer3DModel", "JoyImageEditPlusTransformer3DModel"])
def test_joyimage_shares_a_head_among_three_axes(name: str) -> None:
    """Each with powers of theta of its own; 256 where the file has none."""
    for dims in ([16, 56, 56], [32, 48, 48]):
        ropes = load({"_class_name": name, **JOY, "rope_dim_list": dims, "rope_type": "rope"})
        (rope,) = ropes.ropes
        powers = [10000.0 ** (-np.arange(0, dim, 2) / dim) for dim in dims]
        assert np.allclose(rope.inv_freq, np.concatenate(powers), rtol=1e-14)
        assert (len(ropes), rope.pairing, rope.head_dim) == (40, "interleaved", 128)
    assert load({"_class_name": name, **JOY, "theta": None}).ropes[0].base == 256.0


@each("name, config, head_dim", [
    ("Cosmos3OmniTransformer", {"num_hidden_layers": 36, "rope_axes_dim": [24, 20, 20]}, 128),
    ("Ideogram4Transformer2DModel", {"num_layers": 34, "mrope_section": [24, 20, 20]}, 256),
])  # fmt: skip
def test_sections_of_other_classes_alternate(
    name: str, config: dict[str, Any], head_dim: int
) -> None:
    """Height has pairs 1, 4, 7 and so on, width those after them, and time has the rest."""
    (rope,) = load({"_class_name": name, "num_attention_heads": 16, **config}).ropes
    axes = np.zeros(head_dim // 2, int)
    axes[1:60:3], axes[2:60:3] = 1, 2
    assert [rope.axes.axis_of_pair(head_dim // 2)] == [tuple(axes)]
    powers = 5e6 ** (-np.arange(0, head_dim, 2) / head_dim)
    assert np.allclose(rope.inv_freq, powers, rtol=1e-14)
    assert (rope.pairing, rope.head_dim) == ("half", head_dim)


def test_longcats_audio_turns_by_a_base_in_its_code() -> None:
    """Halves of whole heads, by 100,000."""
    ropes = load(
        {
            "_class_name": "LongCatAudioDiTTransformer",
            "dit_dim": 1536,
            "dit_depth": 24,
            "dit_heads": 24,
        }
    )
    (rope,) = ropes.ropes
    assert (len(ropes), ropes.num_heads) == (24, 24)
    assert (rope.head_dim, rope.base, rope.pairing) == (64, 1e5, "half")


def test_minimax_h3_is_refused_with_its_rope() -> None:
    """As each of its axes has as many pairs as one number says."""
    with refused("class_refused: rotary_dim=96, pairing='half', axes=Axial"):
        load({"_class_name": "MiniMaxH3Transformer3DModel", "num_layers": 50, "rope_freq_dim": 16})
