"""How scores change with distance: RoFormer's decay, its bound, cosines, and linear attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasor._checks import choice, whole
from phasor.angles import as_positions, cos_sin
from phasor.errors import SpecError, TensorError
from phasor.numpy import pair_products, rotate
from phasor.rope import Rope

Kind = Literal["aligned", "opposite", "random", "independent"]
KINDS: tuple[Kind, ...] = ("aligned", "opposite", "random", "independent")

_LOW_BITS = 10  # low bits of a distance; distances with the same low bits share their phasors
_BATCH = 1 << 16  # distances that share factors; without any sharing they take 128 MB
_CHUNK = 1 << 11  # distances in one product: two megabytes


def decay(rope: Rope, distances: ArrayLike) -> NDArray[np.float64]:
    """RoFormer's decay curve: the mean length of the partial sums of ``exp(i r inv_freq[k])``.

    ``(1/n) sum_{j=1..n} |S_j(r)|`` with ``S_j(r) = sum_{k<j} exp(i r inv_freq[k])`` and ``n``
    pairs (Su et al. 2104.09864, section 3.4.3; their figure 2 is width 128, base 10000, ``k``
    from 0). It is a factor of the bound on a score (`abel_bound`), not a score.

    The curve starts at ``(n + 1) / 2``, which is 32.5 at width 128: the printed figure, 6 to 22,
    cuts it off. It does not fall steadily (115 of its first 256 integer steps go up), and from 2048
    on it does not fall at all.

    Args:
        rope: The rope; frequencies in the order of its pairs.
        distances: Integers or floats ``[...]``; ``[..., n_axes]`` for several axes.

    Returns:
        float64 ``[...]``, within ``8e-15 * n`` of the real number at integer distances.

    >>> decay(Rope(head_dim=128, pairing="half"), [0, 1, 8, 256]).round(4)
    array([32.5   , 31.5382, 19.8174,  6.5431])
    """
    return _map_phasors(rope, distances, lambda units: np.abs(np.cumsum(units, axis=-1)).mean(-1))


def abel_bound(q: ArrayLike, k: ArrayLike, distance: ArrayLike, rope: Rope) -> NDArray[np.float64]:
    """An upper bound on ``|score(q, k, distance, rope)|`` by Abel's summation by parts.

    ``max_j |h[j+1] - h[j]| * sum_j |S_j(r)|`` with ``h[k]`` the product of a query's pair and the
    conjugate of a key's, as complex numbers (Su et al. 2104.09864, eq. 36-37). ``h[n] = 0`` belongs
    in the maximum: without it the bound for ``q = k = (1, 1, ...)`` would be 0. Coordinates that
    are not rotated add the absolute value of their dot product.

    The bound is loose: scores of Gaussian vectors of width 128 stay below a twentieth of it up to
    distance 4096, so its decay says little about attention.

    Args:
        q: ``[..., head_dim]``, before rotation.
        k: ``[..., head_dim]``, before rotation.
        distance: Broadcast against the leading dimensions; ``[..., n_axes]`` for several axes.
        rope: The rope.

    Returns:
        float64, the broadcast shape.

    >>> ones = np.ones(128)
    >>> print(abel_bound(ones, ones, 5, Rope(head_dim=128, pairing="half")).round())
    2668.0
    """
    products, unrotated_score = pair_products(q, k, rope)
    steps = np.abs(np.diff(products, axis=-1, append=0)).max(-1)
    return steps * rope.num_pairs * decay(rope, distance) + np.abs(unrotated_score)


def cosine(
    rope: Rope, distances: ArrayLike, kind: Kind, *, seed: int | None = None
) -> NDArray[np.float64]:
    """Cosine of the angle between a rotated query and a rotated key, as a function of distance.

    ``q^T R(r) k / (|q| |k|)`` for one pair of vectors. For ``"aligned"`` it is ``C(r) / n`` with
    ``C(r) = sum_k cos(r * inv_freq[k])`` where the whole head turns. "Similarity falls with
    distance" is a trend of aligned vectors alone: opposite ones rise, and independent ones have
    mean 0 and deviation ``head_dim ** -0.5`` at every distance (Barbero et al. 2410.06205,
    proposition 3.2 and figure 2).

    ``head_dim * cosine(rope, r, "aligned")`` is the trace of ``R(r)``. For random queries whose
    coordinates have one standard deviation, a key that equals the query plus noise outscores an
    independent key by ``deviation**2`` times the trace on average. Where the trace is negative, a
    matching key is expected to score below a random one (Men et al. 2405.14591, theorem 1).

    Args:
        rope: The rope.
        distances: Integers or floats ``[...]``; ``[..., n_axes]`` for several axes.
        kind: ``"aligned"``: ``q = k = (1, 1, ...)``; ``"opposite"``: ``q = (1, 1, ...) = -k``;
            ``"random"``: ``q = k``, Gaussian; ``"independent"``: ``q`` and ``k`` Gaussian.
        seed: Seed of the Gaussian vectors, ``q`` first; only for ``"random"`` and
            ``"independent"``.

    Returns:
        float64 ``[...]``.

    >>> rope = Rope(head_dim=128, pairing="half", base=500_000.0)
    >>> cosine(rope, [0, 100, 10_000], "aligned").round(4)
    array([1.   , 0.611, 0.187])
    >>> cosine(rope, [0, 100, 10_000], "independent", seed=1).round(4)
    array([-0.1302, -0.1417, -0.0839])
    """
    choice("kind", kind, KINDS)
    is_random = kind in ("random", "independent")
    if is_random != (seed is not None):
        requirement = "must be a whole number" if is_random else "must be left out"
        raise SpecError(f"seed {requirement} for {kind} vectors, got {seed!r}")
    if is_random:
        generator = np.random.default_rng(whole("seed", seed, least=0))
        q = generator.standard_normal(rope.head_dim)
        k = q if kind == "random" else generator.standard_normal(rope.head_dim)
    else:
        q = np.ones(rope.head_dim)
        k = q if kind == "aligned" else -q
    products, unrotated_score = pair_products(k, q, rope, gain=1.0)
    scores = _map_phasors(rope, distances, lambda units: (units @ products).real + unrotated_score)
    return scores / (np.linalg.norm(q) * np.linalg.norm(k))


def linear_weights(query: ArrayLike, keys: ArrayLike, rope: Rope) -> NDArray[np.float64]:
    """Weights of all tokens for the last query, in linear attention with a rotated numerator.

    ``w_n = (R(N-1) φ(q) · R(n) φ(k_n)) / Σ_j φ(q) · φ(k_j)`` with ``φ(x) = elu(x) + 1`` (RoFormer
    2104.09864, eq. 19). They are not a distribution: some are negative, and they do not sum to 1.
    Their sum, averaged over independent random keys, is ``cosine(rope, np.arange(N),
    "aligned").mean()``: if features have the same distribution in all coordinates, their mean is a
    vector of equal entries, which cancels when rotated to many positions. This is exact in the
    limit of large ``N``; the sum for a single query differs by a few hundredths.

    Args:
        query: ``[head_dim]``, before the feature map, at position ``N - 1``.
        keys: ``[N, head_dim]``, at positions 0 to ``N - 1``.
        rope: The rope.

    Returns:
        float64 ``[N]``.

    >>> rope = Rope(head_dim=64, pairing="half")
    >>> draw = np.random.default_rng(0)
    >>> weights = linear_weights(draw.standard_normal(64), draw.standard_normal((4096, 64)), rope)
    >>> bool(weights.min() < 0 and weights.sum() < 0.3)
    True
    >>> print(cosine(rope, np.arange(4096), "aligned").mean().round(3))
    0.125
    """
    q, k = np.asarray(query, np.float64), np.asarray(keys, np.float64)
    if q.shape != (rope.head_dim,) or k.ndim != 2 or k.shape[1] != rope.head_dim or not len(k):
        raise TensorError(
            f"query must be [head_dim] and keys [N, head_dim] with head_dim {rope.head_dim} and N "
            f"from 1 on, got shapes {list(q.shape)} and {list(k.shape)}"
        )
    features_q, features_k = _elu_plus_one(q), _elu_plus_one(k)
    rotated_q = rotate(features_q, len(k) - 1, rope)
    rotated_k = rotate(features_k[:, None], np.arange(len(k)), rope)[:, 0]
    return (rotated_k @ rotated_q) / (features_k @ features_q).sum()


def _elu_plus_one(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.exp(np.minimum(x, 0)) + np.maximum(x, 0)


def _map_phasors(
    rope: Rope,
    distances: ArrayLike,
    function: Callable[[NDArray[np.complex128]], NDArray[np.float64]],
) -> NDArray[np.float64]:
    """A number for each distance, computed from ``exp(i r inv_freq)``, ``[n, num_pairs]``."""
    positions = as_positions(distances)
    lead = positions.shape if rope.axes.n_axes == 1 else positions.shape[:-1]
    # [..., n_axes] -> [distances, n_axes], or [...] -> [distances]
    positions = positions.reshape(math.prod(lead), *positions.shape[len(lead) :])
    values = np.empty(len(positions))
    for rows, chunk in _iterate_phasors(rope, positions):
        values[rows] = function(chunk)
    return values.reshape(lead)


def _iterate_phasors(
    rope: Rope, positions: NDArray[Any]
) -> Iterator[tuple[slice, NDArray[np.complex128]]]:
    """Slices of the distances, and ``exp(i r inv_freq)`` of each slice, ``[n, num_pairs]``."""
    if rope.axes.n_axes > 1 or positions.dtype != np.int64:
        for begin in range(0, max(len(positions), 1), _CHUNK):
            rows = slice(begin, begin + _CHUNK)
            yield rows, _axis_phasors(rope, positions[rows])
        return
    for start in range(0, len(positions), _BATCH):
        batch = positions[start : start + _BATCH]
        # R(a + b) = R(a) R(b); distances that differ only in their low bits share a
        high_parts, high_index = np.unique(batch >> _LOW_BITS << _LOW_BITS, return_inverse=True)
        low_parts, low_index = np.unique(batch & ((1 << _LOW_BITS) - 1), return_inverse=True)
        high_phasors, low_phasors = _axis_phasors(rope, high_parts), _axis_phasors(rope, low_parts)
        for begin in range(0, len(batch), _CHUNK):
            rows = slice(begin, begin + _CHUNK)
            chunk = high_phasors[high_index[rows]] * low_phasors[low_index[rows]]
            yield slice(start + begin, start + begin + len(chunk)), chunk


def _axis_phasors(rope: Rope, positions: NDArray[Any]) -> NDArray[np.complex128]:
    cos, sin = cos_sin(positions, rope)
    return cos + 1j * sin
