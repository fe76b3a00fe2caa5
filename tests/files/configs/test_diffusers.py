"""Classes of diffusers by the formulas in their code, and Cosmos by its class."""

from __future__ import annotations

from typing import Any

import numpy as np

from phasor.angles import cos_sin
from phasor.axes import Axial
from phasor.files.reading import load
from phasor.positions import grid
from phasor.scaling import NTK

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


# angles of the token in frame 1, row 2 and column 3 at 30 frames a second, four of time and three
# each of rows and columns: CosmosRotaryPosEmbed of diffusers 0.42.1, run in float32
PAIRS = [0, 1, 10, 21, 22, 23, 42, 43, 44, 63]
COSMOS = {
    (2.0, 1.0, 1.0): [
        0.8000001, 0.5092571, 0.008741, 6.08e-05, 2.0, 1.2898934, 0.0003101, 3.0, 1.9348401,
        0.0004652,
    ],
    (1.0, 3.0, 3.0): [
        0.8000001, 0.5263466, 0.0121593, 0.0001216, 2.0, 1.2209495, 0.0001034, 3.0, 1.8314242,
        0.0001551,
    ],
    (20 / 24, 2.0, 2.0): [
        0.8000001, 0.5309362, 0.0132621, 0.0001459, 2.0, 1.2459549, 0.0001551, 3.0, 1.8689322,
        0.0002326,
    ],
}  # fmt: skip


@each("scale", COSMOS)
def test_cosmos_scales_each_axis_by_its_factor(scale: tuple[float, ...]) -> None:
    """And the note says where frames stand, at another rate than 24 a second."""
    config = {"_class_name": "CosmosTransformer3DModel", "num_attention_heads": 32}
    ropes = load({**config, "num_layers": 28, "rope_scale": list(scale)})
    (rope,) = ropes.ropes
    assert (len(ropes), rope.pairing, rope.head_dim) == (28, "half", 128)
    assert rope.axes.counts(64) == (22, 21, 21)
    assert any("step=(24 / fps, 1, 1)" in note for note in ropes.notes)
    token = grid(3, 4, 5, step=(24 / 30, 1, 1))[1 * 20 + 2 * 5 + 3]
    cos, sin = cos_sin(token, rope)
    # printed with 7 digits, of float32 angles of at most 3
    np.testing.assert_allclose(np.arctan2(sin, cos)[PAIRS], COSMOS[scale], rtol=0, atol=3e-7)


def test_cosmos_without_a_scale_has_that_of_its_class() -> None:
    """Time by two; a scale that is no factor for each axis is refused."""
    config = {"_class_name": "CosmosTransformer3DModel", "num_attention_heads": 16}
    (rope,) = load({**config, "num_layers": 28}).ropes
    assert rope.axes == Axial((22, 21, 21), scaling=(NTK(factor=2.0), None, None))
    with refused("value: a factor for each of 3 axes"):
        load({**config, "num_layers": 28, "rope_scale": [2.0, 1.0]})


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
