"""Functions as people have them are called, or say what they need."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phasor import diff, identify
from phasor.errors import SpecError

WIDTH = 32
STEPS = 5e5 ** (-torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)


def apply_rotary_emb(xq, xk, freqs_cis):
    """Meta's."""
    pairs = [torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) for x in (xq, xk)]
    rows = freqs_cis.view(1, pairs[0].shape[1], 1, pairs[0].shape[-1])
    return tuple(torch.view_as_real(x * rows).flatten(3).type_as(xq) for x in pairs)


def freqs_cis(positions):
    """Its rows."""
    angles = torch.outer(positions.flatten().double(), STEPS)
    return torch.polar(torch.ones_like(angles), angles)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    """As transformers has it."""
    raise AssertionError("not called without a table")


def test_rows_of_metas_are_known_by_their_name():
    """And asked for where no table is given."""
    found = identify(apply_rotary_emb, WIDTH, table=freqs_cis)
    assert (found.pairing, found.base, found.names()) == ("interleaved", 5e5, set())
    with pytest.raises(SpecError, match=r"takes freqs_cis, .* give table \(--table\)"):
        identify(apply_rotary_emb, WIDTH)
    with pytest.raises(SpecError, match="takes cos, sin, "):
        identify(apply_rotary_pos_emb, WIDTH)


def angles_of(positions):
    """``[tokens, pairs]``."""
    return torch.outer(positions.flatten().double(), STEPS)


def both_halves(positions):
    """Cos and sin of both members of a pair, ``[tokens, head_dim]``."""
    angles = angles_of(positions).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def turn_halves(x, cos, sin):
    """As most programs write it."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def looked_up(q, k, cos, sin, position_ids):
    """Rows of a whole table, as in transformers 4."""
    cos, sin = (rows[position_ids].unsqueeze(1) for rows in (cos, sin))
    return turn_halves(q, cos, sin), turn_halves(k, cos, sin)


def of_neighbours(q_nope, k_nope, freqs_cos, freqs_sin):
    """Two real tables, as llama2.c has them."""
    rows = [torch.complex(freqs_cos, freqs_sin)[None, :, None]]
    pairs = [torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) for x in (q_nope, k_nope)]
    return tuple(torch.view_as_real(x * rows[0]).flatten(3) for x in pairs)


def cos_and_sin(positions):
    """For each pair once."""
    return angles_of(positions).cos().float(), angles_of(positions).sin().float()


def in_a_tuple(hidden_states, position_embeddings):
    """Both tables in one argument."""
    return turn_halves(hidden_states, *position_embeddings)


def from_an_offset(x, offset):
    """As MLX counts."""
    return turn_halves(x, *both_halves(offset + torch.arange(x.shape[-2])))


@pytest.mark.parametrize(
    ("function", "table", "takes"),
    [
        (looked_up, both_halves, "q k cos sin positions"),
        (of_neighbours, cos_and_sin, "q k cos sin"),
        (in_a_tuple, both_halves, "x rows"),
        (from_an_offset, None, "x offset"),
    ],
)
def test_what_an_arguments_name_says_is_used(function, table, takes):
    """Whatever the vectors are called."""
    found = identify(function, WIDTH, table=table)
    assert f"({takes})" in found.called
    assert (found.base, found.names() - {"angles-in-float32"}) == (5e5, set())


def test_functions_with_a_table_and_without_one_are_compared():
    """The table is for the function that takes it."""

    def by_positions(x, positions):
        return turn_halves(x, *both_halves(positions))

    assert diff(in_a_tuple, by_positions, head_dim=WIDTH, table=both_halves, context=512) is None


class SequenceFirst(torch.nn.Module):
    """``[seq, batch, heads, head_dim]``, with positions counted from 0."""

    def forward(self, x):
        """Turn."""
        angles = torch.outer(torch.arange(len(x)).double(), STEPS)[:, None, None]
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        turned = [first * cos - second * sin, second * cos + first * sin]
        return torch.cat(turned, -1).to(x.dtype)


def test_an_order_of_dimensions_that_turns_nothing_is_no_verdict():
    """Others are tried, the sequence first among them."""
    found = identify(SequenceFirst(), WIDTH)
    assert "sbhd" in found.called
    assert (found.pairing, found.base) == ("half", 5e5)
    assert "nothing turns" in str(identify(lambda x, positions: 1 * x, WIDTH))


def test_a_class_is_told_from_its_instance():
    """For the function and for its table."""
    with pytest.raises(SpecError, match="function must be an instance, and SequenceFirst is a"):
        identify(SequenceFirst, WIDTH)
    with pytest.raises(SpecError, match="table must be an instance"):
        identify(apply_rotary_emb, WIDTH, table=SequenceFirst)


def test_a_rotation_over_all_heads_at_once_is_found_and_named():
    """The width is that of the heads together."""

    def whole(x, positions):
        b, s, h, d = x.shape
        angles = positions[..., None] * 1e4 ** (-2 * np.arange(h * d // 2) / (h * d))
        first, second = np.split(x.reshape(b, s, h * d), 2, -1)
        cos, sin = np.cos(angles), np.sin(angles)
        y = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
        return y.reshape(x.shape).astype(x.dtype)

    found = identify(whole, WIDTH)
    assert found.names() == {"head-width"}
    assert (found.head_dim, found.base) == (2 * WIDTH, 1e4)


def test_arguments_without_a_meaning_are_listed():
    """In place of a count of nothing that was tried."""

    def odd(a, b, c, d):
        return a

    with pytest.raises(Exception, match=r"no way to call function\(a, b, c, d\)"):
        identify(odd, WIDTH)
