"""xPos and summed angles, each against its formula: complex numbers, and exact fractions."""

from __future__ import annotations

from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn.functional import softplus

from phasor import Rope
from phasor.axes import Axial
from phasor.errors import PositionError, SpecError, TensorError
from phasor.scaling import Yarn
from phasor.torch import Rotation
from phasor.torch.papers import wrapped_cumsum, xpos

from ..torch_arrays import normal

PAIRS = 8
ROPE = Rope(head_dim=2 * PAIRS, pairing="half", base=100.0)
THETA = 100.0 ** (-np.arange(PAIRS) / PAIRS)
ZETA = (2 * np.arange(PAIRS) / 16 + 0.4) / 1.4  # of 2212.10554
PLACES = torch.tensor([0, 1, 700, 2048, 30_000, -5000])


def pairs(x: Tensor) -> np.ndarray:
    """Complex numbers ``[..., num_pairs]`` of halves."""
    values = x.detach().double().numpy()
    return values[..., :PAIRS] + 1j * values[..., PAIRS:]


def fading_scores(q: Tensor, k: Tensor, m: Tensor, n: Tensor, base: float = 512.0) -> np.ndarray:
    """The scores ``[heads, queries, keys]`` of xPos, minus infinity for later keys."""
    apart = (m[:, None] - n).numpy()[..., None]  # [queries, keys, 1]
    past = apart.clip(0)  # no factor above 1
    factors = ZETA ** (past / base) * np.exp(1j * past * THETA)
    scores = np.einsum("qhp,khp,qkp->hqk", pairs(q), pairs(k).conj(), factors).real
    return np.where(apart[..., 0] < 0, -np.inf, scores)


def causal_scores(q: Tensor, k: Tensor, m: Tensor, n: Tensor) -> np.ndarray:
    """The same of rotated queries and keys."""
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double())
    return scores.masked_fill(m[:, None] < n, -torch.inf).detach().numpy()


def assert_close(actual: np.ndarray, expected: np.ndarray, room: float) -> None:
    """Minus infinity in the same places, and everything else to the room."""
    past = np.isfinite(expected)
    assert (np.isfinite(actual) == past).all()
    assert np.abs(actual[past] - expected[past]).max() <= room


@pytest.mark.parametrize("origin", [0, 700, -2.5])
def test_scores_of_xpos_fade_with_the_distance(origin: float) -> None:
    """By ``zeta ** ((m - n) / 512)`` in each pair, wherever both factors are 1."""
    q, k = (normal(6, 3, 16, seed=seed, dtype=torch.float64) for seed in (0, 1))
    of_q, of_k = xpos(PLACES, ROPE, origin=origin, dtype=torch.float64)
    # sixty times the rounding of zeta, and of three products of every pair
    room = float(pairs(q).__abs__().max() * pairs(k).__abs__().max()) * PAIRS * 128 * 2.0**-53
    expected = fading_scores(q, k, PLACES, PLACES)
    assert_close(causal_scores(of_q(q), of_k(k), PLACES, PLACES), expected, room)


def test_another_scale_fades_faster() -> None:
    """In a rope with a factor, which both rotations have."""
    rope = Rope(head_dim=16, pairing="half", scaling=Yarn(factor=8.0, original_max_positions=64))
    q, k = (normal(6, 3, 16, seed=seed, dtype=torch.float64) for seed in (0, 1))
    places = torch.arange(6)
    of_q, of_k = xpos(places, rope, scale_base=2.0, dtype=torch.float64)
    plain = Rotation.at(places, rope, gain=1.0, dtype=torch.float64)
    zeta = torch.from_numpy(ZETA).repeat(2)  # of coordinates
    for y, sign, x in ((of_q(q), 1, q), (of_k(k), -1, k)):
        stretch = zeta ** (sign * places[:, None, None] / 2.0)
        # 0.1 ln(8) + 1
        assert torch.allclose(y, 1.2079441541679836 * stretch * plain(x), rtol=1e-13, atol=1e-13)


def test_long_sequences_have_an_origin_for_each_segment() -> None:
    """In float32, where one origin for 131,072 tokens makes scores infinite or NaN, never wrong."""
    m = n = 131_062 + torch.arange(10)
    n = n - 4500 * (torch.arange(10) < 2)  # two far away
    q, k = normal(10, 3, 16), normal(10, 3, 16, seed=1)
    found = np.full((3, 10, 10), -np.inf)
    for first in (124_928, 126_976, 129_024):
        keys = (n >= first) & (n < first + 2048) if first < 129_024 else n >= first
        of_q, of_k = xpos(m, ROPE, origin=first)[0], xpos(n[keys], ROPE, origin=first)[1]
        found[:, :, keys] = causal_scores(of_q(q), of_k(k[keys]), m, n[keys])
    # two roundings of 2**-24 of every factor and product
    room = float(pairs(q).__abs__().max() * pairs(k).__abs__().max()) * PAIRS * 8 * 2.0**-24
    assert_close(found, fading_scores(q, k, m, n), room)
    of_q, of_k = xpos(m, ROPE)
    assert not np.isfinite(causal_scores(of_q(q), of_k(k), m, n)).any()


def test_the_limit_of_float32_is_where_the_docstring_says() -> None:
    """The key's cosine at the last finite position, and the next one's."""
    still = Rope(head_dim=4, pairing="half", explicit_inv_freq=(0.0, 0.0))
    _, of_k = xpos(torch.tensor([36_260, 36_261]), still)
    of_q, _ = xpos(torch.tensor([-36_260, -36_261]), still)
    for rotation in (of_k, of_q):
        assert rotation.cos[:, 0].isfinite().tolist() == [True, False]
    y = xpos(torch.tensor([4532, 4533]), still)[1](torch.ones(2, 1, 4, dtype=torch.float16))
    assert y[:, 0, 0].isfinite().tolist() == [True, False]


def test_xpos_has_gradients_for_queries_and_keys() -> None:
    """Numerically, in float64."""
    of_q, of_k = xpos(torch.arange(4) * 300, ROPE, dtype=torch.float64)

    def scores(q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("qhd,khd->hqk", of_q(q), of_k(k))

    q, k = (normal(4, 2, 16, seed=s, dtype=torch.float64).requires_grad_() for s in (0, 1))
    assert gradcheck(scores, (q, k))


def test_wrong_arguments_of_xpos_are_refused() -> None:
    """Each by its name."""
    axial = Rope(head_dim=8, pairing="half", axes=Axial((2, 2)))
    with pytest.raises(SpecError, match="rope must have one axis"):
        xpos(torch.zeros(3, 2, dtype=torch.int64), axial)
    with pytest.raises(SpecError, match="scale_base must be"):
        xpos(3, ROPE, scale_base=0)
    with pytest.raises(SpecError, match="origin must be"):
        xpos(3, ROPE, origin="middle")  # pyright: ignore[reportArgumentType]
    with pytest.raises(PositionError, match="positions must be"):
        xpos(torch.tensor([True]), ROPE)
    with pytest.raises(SpecError, match="dtype must be"):
        xpos(3, ROPE, dtype=torch.bfloat16)


# ---- sums of steps ----


def turned(angles: Tensor) -> np.ndarray:
    """Points on the circle, where angles that differ by whole turns are equal."""
    return np.exp(1j * angles.detach().numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_are_those_of_exact_fractions(dtype: torch.dtype) -> None:
    """Of steps of any size, within ``n * s * 2**-51``."""
    for size in (1e-6, 3.0, 1000.0):
        steps = (size * normal(300, 2, seed=7, dtype=torch.float64)).to(dtype)
        angles = wrapped_cumsum(steps, 0)
        assert (angles.dtype, angles.shape) == (torch.float64, steps.shape)
        assert float(angles.abs().max()) <= 3.1415926535897936
        with mpmath.workdps(60):
            for column in range(2):
                total = Fraction(0)
                for i, step in enumerate(steps[:, column].tolist()):
                    total += Fraction(step)
                    right = mpmath.mpf(total.numerator) / total.denominator
                    angle = mpmath.mpf(angles[i, column].item())
                    apart = abs(mpmath.expj(angle) - mpmath.expj(right))
                    assert apart <= (i + 1) * float(steps.abs().max()) * 2.0**-51 + 2.0**-50


def test_a_million_steps_do_not_drift() -> None:
    """Compared with whole numbers: a step of 2**-20 radians times an integer, summed exactly."""
    whole = torch.randint(1, 2**21, (1_000_000, 1), generator=torch.Generator().manual_seed(0))
    steps = whole.double() / 2**20
    exact = whole.cumsum(0).double() / 2**20  # below 2**53
    apart = np.abs(turned(wrapped_cumsum(steps, 0)) - turned(exact))
    assert apart.max() <= 2e-9
    drifting = np.abs(turned(steps.float().cumsum(0).double()) - turned(exact))
    assert drifting.max() > 1e-2


def test_a_sum_goes_on_from_an_earlier_one() -> None:
    """Cut anywhere, token by token too, along any dimension, by its last angles."""
    steps = 3 * normal(2, 40, 3, 4, dtype=torch.float64)
    whole = wrapped_cumsum(steps, 1)
    first = wrapped_cumsum(steps[:, :25], 1)
    rest = wrapped_cumsum(steps[:, 25:], -3, start=first.select(1, -1))
    assert rest.shape == (2, 15, 3, 4)
    assert np.abs(turned(torch.cat((first, rest), 1)) - turned(whole)).max() < 1e-13
    angles = first
    for i in range(25, 40):
        angles = wrapped_cumsum(steps[:, i : i + 1], 1, start=angles.select(1, -1))
        assert np.abs(turned(angles) - turned(whole[:, i : i + 1])).max() < 1e-13
    nothing = wrapped_cumsum(steps[:, :0], 1, start=angles.select(1, -1))
    assert nothing.shape == (2, 0, 3, 4)


def test_sums_have_the_gradient_of_sums() -> None:
    """For steps and for the start, numerically, also where the sum wraps."""
    steps = 2 * normal(5, 3, dtype=torch.float64, seed=2)
    start = normal(3, dtype=torch.float64, seed=3)

    def function(steps: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        angles = wrapped_cumsum(steps, 0, start=start)
        return angles.cos(), angles.sin()

    leaves = steps.requires_grad_(), start.requires_grad_()
    assert gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True)
    float32 = steps.detach().float().requires_grad_()
    wrapped_cumsum(float32, 0).sum().backward()
    assert float32.grad is not None
    assert float32.grad[:, 0].tolist() == [5, 4, 3, 2, 1]


def test_steps_that_are_not_finite_are_seen() -> None:
    """NaN from there on, not a silent angle."""
    for bad in (torch.nan, torch.inf):
        angles = wrapped_cumsum(torch.tensor([1.0, bad, 1.0]), 0)
        assert angles.isnan().tolist() == [False, True, True]


def test_carope_is_a_rope_if_the_input_is_constant() -> None:
    """With angles that are powers of one number per head (2507.23083, eq. 6), and a gradient."""
    hidden, q = normal(10, 12, dtype=torch.float64), normal(10, 3, 16, dtype=torch.float64)

    def carope(w: Tensor) -> Rotation:
        rate = 1 / (1 + softplus(hidden @ w))  # [seq, heads]
        steps = rate[..., None] ** torch.arange(PAIRS)
        angles = wrapped_cumsum(steps, dim=-3)
        return Rotation.from_angles(angles, pairing="half", dtype=torch.float64)

    rate = 1 / (1 + np.log(2))
    angles = np.arange(1, 11)[:, None] * rate ** np.arange(PAIRS)
    y = carope(torch.zeros(12, 3, dtype=torch.float64))(q)
    assert np.abs(pairs(y) - pairs(q) * np.exp(1j * angles)[:, None]).max() < 1e-13
    w = normal(12, 3, dtype=torch.float64, seed=5).requires_grad_()
    assert gradcheck(lambda w: carope(w)(q), w)


def test_selective_scores_depend_on_the_steps_between() -> None:
    """Of tokens after the key up to the query (2511.17388), and no others; with a gradient."""
    hidden = normal(10, 12, dtype=torch.float64)
    q, k = (normal(10, 3, 16, seed=s, dtype=torch.float64) for s in (1, 2))
    theta = torch.from_numpy(THETA)

    def selective(w: Tensor) -> Rotation:
        steps = (hidden @ w).unflatten(-1, (3, PAIRS)) * theta
        angles = wrapped_cumsum(steps, dim=-3)
        return Rotation.from_angles(angles, pairing="half", dtype=torch.float64)

    w = normal(12, 3 * PAIRS, dtype=torch.float64, seed=5).requires_grad_()
    turn = selective(w)
    score = (turn(q)[9] * turn(k)[4]).sum(-1).detach().numpy()
    steps = (hidden @ w).detach().numpy().reshape(10, 3, PAIRS)
    between = steps[5:].sum(0) * THETA
    expected = (pairs(q[9]) * pairs(k[4]).conj() * np.exp(1j * between)).sum(-1).real
    assert np.abs(score - expected).max() < 1e-12
    assert gradcheck(lambda w: selective(w)(q), w)


@pytest.mark.compile
def test_sums_compile_and_are_not_rounded_by_autocast(one_graph: None) -> None:
    """The integers wrap in generated code too, within a bound per token."""
    steps = 3 * normal(2000, 4, dtype=torch.float64)
    plain = wrapped_cumsum(steps, 0)

    def function(steps: Tensor) -> Tensor:
        return wrapped_cumsum(steps, 0)

    compiled = torch.compile(function, fullgraph=True)(steps)
    assert np.abs(turned(compiled) - turned(plain)).max() <= 2000 * 15 * 2.0**-51
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(wrapped_cumsum(steps, 0), plain)


def test_wrong_steps_are_refused() -> None:
    """Each by its name."""
    steps = normal(5, 3)
    with pytest.raises(TensorError, match="steps must be"):
        wrapped_cumsum(torch.arange(4), 0)
    with pytest.raises(SpecError, match="dim must be"):
        wrapped_cumsum(steps, 2)
    with pytest.raises(TensorError, match=r"start must have the shape .* \(\[3\]\), got \[1, 3\]"):
        wrapped_cumsum(steps, 0, start=normal(1, 3))
