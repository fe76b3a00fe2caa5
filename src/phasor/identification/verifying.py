"""`verify`: does a recording rotate like a rope, and if not, what differs?

The rope is tried first, as it is. Only then the recording is measured: which coordinates turn
together and by which factor, by which angle each token's pairs are turned, and which positions,
frequencies or roundings give these angles. All decisions are made within bounds, not by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from phasor.errors import SpecError, TensorError
from phasor.identification.recorded import compare_sides, verify_side
from phasor.identification.recordings import SIDES, TABLES, read_recording
from phasor.identification.report import SideVerification, Verification
from phasor.layers import LayerRopes, one_layer
from phasor.rope import Rope

Progress = Callable[[int, int], None]


def verify(
    rope: Rope | LayerRopes,
    recording: object,
    *,
    dims: str | None = None,
    seq_len: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Whether vectors or tables that a program recorded rotate as ``rope`` says, and what differs.

    Args:
        rope: The checkpoint's ropes, from `phasor.load`; a Rope is used for every layer.
        recording: A mapping, or a ``.safetensors`` or ``.npz`` file, of ``positions``, ``q`` and
            ``q_rotated``, ``k`` and ``k_rotated`` (``layers.3.q`` where there are several layers;
            ``qk`` for both in one tensor), any order of dimensions. Or of tables, a row a
            position: ``cos`` and ``sin``, ``cos_sin_cache``, complex ``freqs_cis``, angles
            ``freqs``; also a module that holds them.
        dims: The order of dimensions, such as ``"bshd"``; ``"sd"`` for ``[tokens, heads * dim]``.
            Found unless given.
        seq_len: The length at which a rule picks its law; the highest position's unless given.
        progress: Called with how many numbers were looked at, and how many there are.

    Returns:
        The verdict: false if everything rotates as it should, printed as a report.

    Raises:
        TensorError: If the recording cannot be read so, saying why.
        PositionError: If positions are not finite.

    >>> import numpy as np
    >>> from phasor.numpy import rotate
    >>> rope = Rope(head_dim=64, pairing="half", base=10_000.0)
    >>> q = np.random.default_rng(0).standard_normal((16, 2, 64))
    >>> turned = rotate(q, np.arange(16), Rope(head_dim=64, pairing="interleaved", base=10_000.0))
    >>> found = verify(rope, {"positions": np.arange(16), "q": q, "q_rotated": turned})
    >>> print(found.sides[0].changes[0].sentence)
    Pairing: interleaved instead of half.
    """
    layers = one_layer(rope) if isinstance(rope, Rope) else rope
    if not isinstance(layers, LayerRopes):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SpecError(f"rope must be a Rope or LayerRopes, got {type(rope).__name__}")
    if not layers.ropes:
        raise SpecError(f"rope must have a layer that rotates, and {layers.name} has none")
    arrays = read_recording(recording)
    shared = arrays.pop(None, {})
    positions = {name: array for name, array in shared.items() if name == "positions"}
    if not arrays or shared.keys() - positions:
        arrays = {None: shared, **arrays}
    sides: list[SideVerification] = []
    sizes = (
        (name, array.size)
        for layer_arrays in arrays.values()
        for name, array in layer_arrays.items()
    )
    done, total = 0, sum(size for name, size in sizes if name != "positions")
    for layer, layer_arrays in sorted(arrays.items(), key=lambda item: item[0] or 0):
        index = 0 if layer is None or layers is not rope else layer  # a Rope is every layer's
        if index >= len(layers):
            count = f"{layers.name} has {len(layers)} layers, counted from 0"
            raise TensorError(f"the recording has a layer {layer}, but {count}")
        if layer is None and len(set(layers)) > 1:
            raise TensorError(
                f"{layers.name} has layers of the kinds {', '.join(map(repr, layers.kinds))}, "
                "which rotate differently: name the arrays by layer, as layers.0.q or "
                "layers.0.cos, or give the rope of one kind"
            )
        kind, title = layers.layer_kinds[index], "" if layer is None else f"layer {layer}, "
        layer_recording = positions | layer_arrays
        vectors = [side for side in SIDES if layer_recording.keys() & {side, f"{side}_rotated"}]
        tables = [] if vectors and not layer_recording.keys() & {*TABLES} else ["tables"]
        verdicts: dict[str, SideVerification] = {}
        for side in (*vectors, *tables):
            names = {*TABLES} if side == "tables" else {side, f"{side}_rotated"}
            size = sum(array.size for name, array in layer_arrays.items() if name in names)

            def advance(share: float, before: int = done, size: int = size) -> None:
                if progress is not None:
                    progress(before + int(share * size), total)

            verdict = verify_side(
                layers, kind, layer_recording, side, dims, seq_len, advance=advance
            )
            done += size
            verdicts[side] = replace(verdict, name=f"{title}{side}")
        rope_of_kind = layers.kinds[kind]
        if rope_of_kind is not None and verdicts.keys() >= {"q", "k"}:
            sides_of_layer = verdicts["q"], verdicts["k"]
            verdicts["q"], verdicts["k"] = compare_sides(
                *sides_of_layer, layer_recording, rope_of_kind, dims
            )
        sides += verdicts.values()
    return Verification(model=layers.name, sides=tuple(sides))
