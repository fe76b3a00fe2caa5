"""Positions of image and video pipelines, against the numbers of diffusers 0.42.1's own code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from phasor import PositionError
from phasor.positions import grid, layered, text_behind

# QwenEmbedRope(scale_rope=True) of images of 3 by 4 and 2 by 2 patches and two words: the
# coordinates whose table rows it took
QWEN_IMAGES = [
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1],
    [-2, -2, -2, -2, -1, -1, -1, -1, 0, 0, 0, 0, -1, -1, 0, 0],
    [-2, -1, 0, 1, -2, -1, 0, 1, -2, -1, 0, 1, -1, 0, -1, 0],
]
# QwenEmbedLayer3DRope(scale_rope=True) of two layers and the image, 2 by 3 patches each
QWEN_LAYERS = [
    [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1],
    [-1, -1, -1, 0, 0, 0, -1, -1, -1, 0, 0, 0, -1, -1, -1, 0, 0, 0],
    [-2, -1, 0, -2, -1, 0, -2, -1, 0, -2, -1, 0, -2, -1, 0, -2, -1, 0],
]


def test_qwen_image_counts_from_the_middle_and_has_text_behind() -> None:
    """An odd number of rows has one more above."""
    images = layered([(3, 4), (2, 2)], centred=True)
    assert images.T.tolist() == QWEN_IMAGES
    assert text_behind(images, 2).T.tolist() == [[2, 3]] * 3


def test_qwen_image_layered_has_the_whole_image_at_minus_one() -> None:
    """Text stands behind the layers where these are the larger."""
    images = layered([(2, 3)] * 3, layers=[0, 1, -1], centred=True)
    assert images.T.tolist() == QWEN_LAYERS
    assert text_behind(images, 2).T.tolist() == [[2, 3]] * 3
    many = layered([(1, 1)] * 6, layers=[*range(5), -1], centred=True)
    assert many.T.tolist() == [[0, 1, 2, 3, 4, -1], [-1] * 6, [-1] * 6]
    assert text_behind(many, 2).T.tolist() == [[5, 6]] * 3


def test_flux_2_has_its_references_ten_apart() -> None:
    """`Flux2Pipeline._prepare_image_ids` of 1 by 2 and 2 by 1 patches, without its text axis."""
    references = layered([(1, 2), (2, 1)], layers=[10, 20])
    assert references.T.tolist() == [[10, 10, 20, 20], [0, 0, 0, 1], [0, 1, 0, 0]]


def test_z_image_has_its_image_after_the_text() -> None:
    """`create_coordinate_grid((1, 2, 2), (33, 0, 0))`, and of text ``((3, 1, 1), (1, 0, 0))``."""
    image = grid(1, 2, 2, start=(33, 0, 0))
    assert image.T.tolist() == [[33, 33, 33, 33], [0, 0, 1, 1], [0, 1, 0, 1]]
    assert image.dtype == np.int64
    assert grid(3, 1, 1, start=(1, 0, 0)).T.tolist() == [[1, 2, 3], [0, 0, 0], [0, 0, 0]]


def test_cogvideox_keeps_the_range_it_was_trained_on() -> None:
    """`get_3d_rotary_pos_embed` of 6 by 9 patches on the trained 30 by 45: every fifth position."""
    video = grid(3, 6, 9, step=(1, 30 / 6, 45 / 9))
    assert video[1 * 54 + 2 * 9 + 3].tolist() == [1, 10, 15]
    # its float32 angles of pairs 0 of each axis are 1, 10 - 4 pi and 15 - 4 pi
    printed = np.array([1.0, -2.566371, 2.433629])
    np.testing.assert_allclose(np.array([1, 10 - 4 * np.pi, 15 - 4 * np.pi]), printed, atol=2e-6)
    finer = grid(2, 3, step=(14 / 32, 0.5))
    assert finer.dtype == np.float64
    assert finer[-1].tolist() == [14 / 32, 1.0]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: grid(2, 2, step=(1, 1, 1)), "step must have a number for each of 2 axes, got "),
        (lambda: grid(2, 2, start=5), "start must have a number for each of 2 axes, got 5"),
        (lambda: grid(2, 2, start=(0, float("nan"))), "start[1] must be a finite number, got nan"),
        (lambda: layered([4, 4]), "sizes[0] must be the rows and columns of an image, such as "),
        (lambda: layered([(4, 4)], layers=[0, 1]), "layers must name a layer for each of 1 images"),
        (lambda: layered([(4, 4)], centred="yes"), "centred must be True or False, got 'yes'"),
        (lambda: text_behind([0, 1, 2], 4), "positions must be [seq, n_axes], the coordinates "),
    ],
)
def test_what_has_no_place_is_refused(call: Any, text: str) -> None:
    """With the argument's name."""
    with pytest.raises(PositionError) as caught:
        call()
    assert str(caught.value).startswith(text)
