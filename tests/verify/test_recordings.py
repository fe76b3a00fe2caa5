"""What a recording may be: arrays, files, orders of dimensions, tables; and what is refused."""

import io
import json
import re
import tracemalloc
import zipfile
from contextlib import suppress
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import save_file
from tests import oracle
from tests.each import each
from tests.verify.programs import (
    HEADS,
    OTHER,
    ROPE,
    TOKENS,
    names,
    recording,
    rotate,
    rounded,
    stored,
    turn_as,
    vectors,
)

import phasor.numpy
import phasor.positions
import phasor.torch
from phasor import LayerRopes, PhasorError, Rope, diff, preset, verify
from phasor.axes import Axial, Sectioned
from phasor.cli import main
from phasor.layers import QueryFactor
from phasor.scaling import Yarn
from phasor.testing import assert_rotates

ORDERS = {
    "sd": lambda x: x.reshape(len(x), -1),
    "shd": lambda x: x,
    "hsd": lambda x: x.transpose(1, 0, 2),
    "bshd": lambda x: x.reshape(2, TOKENS // 2, HEADS, -1),
    "bhsd": lambda x: x.reshape(2, TOKENS // 2, HEADS, -1).transpose(0, 2, 1, 3),
    "dhsb": lambda x: x.reshape(2, TOKENS // 2, HEADS, -1).transpose(3, 2, 1, 0),
}


@pytest.mark.parametrize("dims", ORDERS)
@pytest.mark.parametrize("given", [True, False])
def test_the_order_of_dimensions_is_taken_or_found(dims, given):
    """The order of dimensions is taken or found."""
    for rope, expected in ((ROPE, []), (OTHER, ["pairing"])):
        x, y = map(ORDERS[dims], vectors(rope))
        arrays = {"positions": np.arange(TOKENS), "k": np.float32(x), "k_rotated": np.float32(y)}
        if "b" in dims:
            arrays["positions"] = arrays["positions"].reshape(2, -1)
        assert names(verify(ROPE, arrays, dims=dims if given else None)) == expected


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_files_hold_any_dtype(dtype, tmp_path):
    """Files hold any dtype."""
    arrays = recording(dtype=dtype)
    np.savez(tmp_path / "one.npz", **arrays)
    np.savez_compressed(tmp_path / "two.npz", **arrays)
    for file in ("one.npz", "two.npz"):
        assert not verify(ROPE, tmp_path / file)
        assert names(verify(OTHER, str(tmp_path / file))) == ["pairing"]


def test_safetensors_and_torch_hold_bfloat16(tmp_path):
    """Safetensors and torch hold bfloat16."""
    torch = pytest.importorskip("torch")
    save = pytest.importorskip("safetensors.torch").save_file
    x, y = (torch.tensor(one).bfloat16() for one in vectors(dtype="bfloat16"))
    y = torch.tensor(rotate(x.double().numpy(), np.arange(TOKENS), ROPE, "bfloat16")).bfloat16()
    arrays = {"positions": torch.arange(TOKENS), "q": x, "q_rotated": y}
    save(arrays, tmp_path / "x.safetensors")
    assert not verify(ROPE, arrays)
    assert not verify(ROPE, tmp_path / "x.safetensors")
    assert names(verify(OTHER, tmp_path / "x.safetensors")) == ["pairing"]


def test_positions_are_whole_numbers_of_any_size(tmp_path):
    """Or float32 and float64, which 16 bits are not."""
    for dtype in ("uint8", "int16", "uint16", "uint32", "uint64", "float32"):
        arrays = recording(positions=np.arange(TOKENS, dtype=dtype))
        save_file(arrays, tmp_path / "x.safetensors")
        assert not verify(ROPE, arrays), dtype
        assert not verify(ROPE, tmp_path / "x.safetensors"), dtype
    for dtype in ("float16", ml_dtypes.bfloat16, bool):
        text = f"whole numbers, float32 or float64, got {np.dtype(dtype)}"
        with pytest.raises(PhasorError, match=text):
            verify(ROPE, recording(positions=np.arange(TOKENS).astype(dtype)))


def test_layers_are_compared_each_with_its_rope():
    """Layers are compared each with its rope."""
    layers = LayerRopes(name="two", layer_kinds=("a", "none"), kinds={"a": ROPE, "none": None})
    x, y = map(np.float32, vectors())
    arrays = {"positions": np.arange(TOKENS), "layers.0.q": x, "layers.0.q_rotated": y,
              "model.layers.1.q": x, "model.layers.1.q_rotated": x}  # fmt: skip
    assert not verify(layers, arrays)
    found = verify(layers, arrays | {"model.layers.1.q_rotated": y})
    assert names(found) == ["turned"]
    assert [side.name for side in found.sides if side] == ["layer 1, q"]
    arrays = {name.replace("layers", "blk"): array for name, array in arrays.items()}
    with pytest.raises(PhasorError, match="a layer 2, but two has 2 layers, counted from 0"):
        verify(layers, arrays | {"h.2.q": x, "h.2.q_rotated": y})
    # a rope alone is that of every layer
    assert [bool(side) for side in verify(ROPE, arrays).sides] == [False, True]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_temperature_is_named_unless_it_is_the_layers_own(dtype: str):
    """In a layer that does not turn; keys have none."""
    factor = QueryFactor(strength=0.1, length=16)
    kinds = {"none": None, "a": ROPE}
    layers = LayerRopes(name="two", layer_kinds=("none", "a"), kinds=kinds)
    scaled = replace(layers, query_factors={"none": factor})
    x = rounded(vectors()[0], dtype)
    y = rounded(x * factor(np.arange(TOKENS))[:, None, None], dtype)
    for side in ("q", "k"):
        arrays = {"positions": np.arange(TOKENS), f"layers.0.{side}": stored(x, dtype),
                  f"layers.0.{side}_rotated": stored(y, dtype)}  # fmt: skip
        assert names(verify(layers, arrays)) == ["multiplied"]
        assert names(verify(scaled, arrays)) == (["multiplied"] if side == "k" else [])
    (change,) = verify(layers, arrays).sides[0].changes
    assert change.sentence.startswith("Each token is multiplied by one number, 1 to 1.0")
    places = np.arange(4000)
    x = np.random.default_rng(0).standard_normal((4000, 1, 64)).astype(dtype="float32")
    y = x * factor(places)[:, None, None]
    arrays = {"positions": places, "layers.0.q": x, "layers.0.q_rotated": np.float32(y)}
    assert not verify(scaled, arrays)
    arrays["layers.0.q_rotated"][1234] *= 1.25
    assert names(verify(scaled, arrays)) == ["multiplied"]
    with pytest.raises(PhasorError, match="must have a layer that rotates, and one has none"):
        verify(LayerRopes(name="one", layer_kinds=("none",), kinds={"none": None}), arrays)


@pytest.mark.parametrize("width", [16, 32, 128])
def test_heads_of_another_width_are_named(width: int):
    """As which all coordinates of a token are turned, and of which a rope says the frequencies."""
    x = np.random.default_rng(0).standard_normal((TOKENS, 4, 64))
    other = replace(ROPE, head_dim=width, rotary_dim=width)
    turned = rotate(x.reshape(TOKENS, -1, width), np.arange(TOKENS), other, "float32")
    y = turned.reshape(x.shape)
    for shape in (x.shape, (TOKENS, -1)):
        found = verify(ROPE, {"positions": np.arange(TOKENS), "q": np.float32(x).reshape(shape),
                              "q_rotated": np.float32(y).reshape(shape)})  # fmt: skip
        assert names(found) == ["head-width"]


def test_arrays_without_a_layer_are_of_layers_that_all_rotate_alike():
    """Where layers differ, what agrees with one may be wrong in another: the layer is asked for."""
    same = LayerRopes(name="two", layer_kinds=("a", "b"), kinds={"a": ROPE, "b": ROPE})
    (side,) = verify(same, recording()).sides
    assert side.lines() == ["q: rotates as it should (24 tokens)."]
    layers = replace(same, kinds={"a": ROPE, "b": None})
    for arrays in (recording(), recording(OTHER), {"freqs": np.ones((3, 32))}):
        with pytest.raises(PhasorError, match=r"kinds 'a', 'b', .* by layer, as layers\.0\.q"):
            verify(layers, arrays)


PAIRS_OF_NAMES = [
    ("stages.0.q", "stages.1.q"),
    ("visual.layers.0.q", "language_model.layers.0.q"),
    ("layers.0.self_attn.q", "layers.0.self_attn.indexer.q"),
    ("positions", "model.positions"),
    ("cos", "cos_cached"),
]


@each("first, second", PAIRS_OF_NAMES)
def test_two_names_of_one_array_are_refused(first, second):
    """And both are named."""
    x, _ = vectors()
    with pytest.raises(PhasorError, match=f"got '{first}' and '{second}'"):
        verify(ROPE, {first: x, second: x})


@pytest.mark.slow
def test_everything_in_a_recording_is_looked_at():
    """Tables beside vectors, half of a side, and vectors beside those of layers."""
    wrong = np.arange(TOKENS)[:, None] / 1e4 ** (np.arange(32) / 16)
    found = verify(ROPE, recording(freqs=wrong))
    assert [(side.name, bool(side)) for side in found.sides] == [("q", False), ("tables", True)]
    x, y = vectors()
    with pytest.raises(PhasorError, match="must hold k too"):
        verify(ROPE, recording(k_rotated=y))
    found = verify(ROPE, recording() | {"layers.0.k": x, "layers.0.k_rotated": y})
    assert [side.name for side in found.sides] == ["q", "layer 0, k"]


COS, SIN = oracle.rows(ROPE, range(300))
TABLES = {
    "halves": {"cos": COS, "sin": SIN},
    "both members": {"cos_cached": np.tile(COS, 2), "sin_cached": np.tile(SIN, 2)},
    "neighbours": {"cos": COS.repeat(2, -1)[None], "sin": SIN.repeat(2, -1)[None]},
    "one table": {"cos_sin_cache": np.concatenate([COS, SIN], -1)},
    "complex": {"freqs_cis": COS + 1j * SIN},
    "real": {"freqs_cis": np.stack([COS, SIN], -1)},
    "onnx": {"cos_cache": COS, "sin_cache": SIN},
}


@pytest.mark.parametrize("kind", TABLES)
def test_tables_are_rows_of_positions(kind):
    """Tables are rows of positions."""
    table = {name: np.complex64(t) if np.iscomplexobj(t) else np.float32(t)
             for name, t in TABLES[kind].items()}  # fmt: skip
    assert not verify(ROPE, table)
    assert names(verify(Rope(head_dim=64, pairing="half", base=500_000.0), table)) == ["base"]
    holder = type("Module", (), table)
    assert not verify(ROPE, holder)


def test_tables_of_angles_and_of_some_positions():
    """Tables of angles and of some positions."""
    steps = np.array([float(f) for f in oracle.frequencies(ROPE)])
    places = np.array([3, 70, 900])
    angles = places[:, None, None, None] * steps
    assert not verify(ROPE, {"freqs": angles, "positions": places})
    assert names(verify(ROPE, {"freqs": 2 * angles, "positions": places})) == ["twice"]
    assert (
        verify(ROPE, {"cos": COS[:, :16], "sin": SIN[:, :16]}).sides[0].changes[0].name == "slice"
    )


@pytest.mark.parametrize("n_axes", [1, 3])
def test_tables_of_a_batch_have_its_positions(n_axes):
    """As transformers' pair has, also of several axes before their pairs are taken."""
    rope = replace(ROPE, axes=Sectioned((8, 12, 12))) if n_axes == 3 else ROPE
    shape = (3, 2, 40) if n_axes == 3 else (2, 40)
    places = np.random.default_rng(0).integers(0, 300, shape)
    arrays = {"positions": places, "cos": np.tile(COS[places], 2), "sin": np.tile(SIN[places], 2)}
    assert not verify(rope, arrays)
    assert names(verify(replace(rope, base=5e5), arrays)) == ["base"]
    with pytest.raises(PhasorError, match=r"positions \[7\]"):
        verify(rope, arrays | {"positions": np.arange(7)})
    del arrays["positions"]
    with pytest.raises(PhasorError, match=re.escape(f"must come with positions {[*shape]}")):
        verify(rope, arrays)


def test_tables_of_several_axes_have_rows_of_tokens():
    """As Qwen3-VL's pair, whose positions have the axes first."""
    rope = replace(ROPE, axes=Sectioned((8, 12, 12)))
    places = np.random.default_rng(0).integers(0, 300, (2, 40, 3))
    axis = np.repeat(np.arange(3), (8, 12, 12))
    cos, sin = (table[places[..., axis], np.arange(32)] for table in (COS, SIN))
    for at in (places, np.moveaxis(places, -1, 0)):
        assert not verify(rope, {"positions": at, "cos": cos, "sin": sin})


def test_pairs_that_are_equal_are_no_narrower_slice():
    """As at position 0, and of two axes in text; elsewhere half of the pairs say all twice."""
    planes = replace(ROPE, axes=Axial((16, 16)))
    cos, sin = (np.tile(t, 2) for t in oracle.rows(replace(ROPE, rotary_dim=32), range(300)))
    for rope, rows in ((ROPE, 1), (planes, 300)):
        for width in (1, 2):
            table = {"cos": np.tile(cos[:rows], width), "sin": np.tile(sin[:rows], width)}
            assert not verify(rope, table)
    assert names(verify(ROPE, {"cos": cos, "sin": sin})) == ["slice"]


def test_rows_that_are_no_rotation_are_never_right():
    """Noise, zeros, and angles that are not multiplied by one factor."""
    noise = np.random.default_rng(0).standard_normal((2, *COS.shape))
    for cos, sin in (noise, 0 * noise, np.array([COS, SIN]) * np.linspace(1, 2, 300)[:, None]):
        found = verify(ROPE, {"cos": cos, "sin": sin})
        assert found, str(found)


def test_a_table_rounded_to_bfloat16_is_named():
    """A table rounded to bfloat16 is named."""
    torch = pytest.importorskip("torch")
    rounded = [torch.tensor(t).bfloat16().float().numpy() for t in (COS, SIN)]
    found = verify(ROPE, {"cos": rounded[0], "sin": rounded[1]})
    assert names(found) == ["table-in-bfloat16"]


def rows_of_nan(arrays):
    """NaN in one head of a token."""
    arrays["q"][3, 0, 5] = np.nan


REFUSED = {
    "positions": (lambda a: a.pop("positions"), "must hold positions too"),
    "rotated": (lambda a: a.pop("q_rotated"), "must hold q_rotated too"),
    "shape": (lambda a: a.update(q=a["q"][:5]), "must have one shape"),
    "short": (lambda a: a.update(positions=np.arange(7)), "a position for each token"),
    "name": (lambda a: a.update(query=a["q"]), "got 'query'"),
    "nan": (rows_of_nan, "infinity at token 3"),
    "whole": (lambda a: a.update(q=np.ones((24, 3, 64), int)), "must be of float64"),
    "objects": (lambda a: a.update(q=np.array([object()])), "must be of float64"),
    "wide": (lambda a: a.update(q=np.ones((24, 3, 64), np.longdouble)), r"got float\d+$"),
    "meta": (lambda a: a.update(q=torch.ones(24, 3, 64, device="meta")), "q must be an array"),
    "sparse": (lambda a: a.update(q=torch.ones(24, 192).to_sparse()), "q must be an array"),
    "fp8": (lambda a: a.update(q=np.zeros((24, 3, 64), np.uint8)), "8 bits hold no"),
    "width": (lambda a: a.update(q=np.ones((24, 3, 7)), q_rotated=np.ones((24, 3, 7))), "d = 64"),
    "zeros": (lambda a: a.update(q=0 * a["q"], q_rotated=0 * a["q"]), "other numbers than 0"),
    "infinite": (lambda a: a.update(positions=np.full(24, np.inf)), "finite"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_recording_is_refused(case):
    """What is no recording is refused."""
    arrays = recording()
    break_it, text = REFUSED[case]
    break_it(arrays)
    with pytest.raises(PhasorError, match=text):
        verify(ROPE, arrays)
    with pytest.raises(PhasorError, match="got nothing"):
        verify(ROPE, {})
    for dims in ("vllm", "sd", "bsdhb", 4):
        with pytest.raises(PhasorError, match=f"dims must have a letter.*got {dims!r}"):
            verify(ROPE, recording(), dims=dims)
    with pytest.raises(PhasorError, match="rope must be"):
        verify("llama", recording())


def test_heads_that_are_not_rotated_are_named():
    """As keys beside queries in one tensor."""
    arrays = recording()
    arrays["qk"], arrays["qk_rotated"] = arrays.pop("q"), arrays.pop("q_rotated")
    arrays["qk_rotated"][:, 2] = arrays["qk"][:, 2]
    found = verify(ROPE, arrays)
    assert names(found) == ["heads", "not-turned"]
    assert "Only some heads are wrong, counted from 0: 2." in str(found)


def test_one_token_of_decoding_has_one_reading():
    """Its heads may stand for tokens of one position, which is the same."""
    rope = replace(ROPE, base=500_000.0)
    x, y = vectors(rope, positions=np.array([900]))
    arrays = {"positions": np.array([900]), "q": x[None], "q_rotated": y[None]}
    assert names(verify(ROPE, arrays)) == ["base"]


def test_two_orders_that_both_explain_are_named():
    """Two orders that both explain are named."""
    x = np.random.default_rng(0).standard_normal((1, 64, 64, 64))
    with pytest.raises(PhasorError, match="'bshd' and as 'bhsd'"):
        verify(ROPE, {"positions": np.zeros(64, int), "q": x, "q_rotated": x})


def test_damaged_files_are_refused_whatever_is_damaged(tmp_path):
    """Damaged files are refused whatever is damaged."""
    path = tmp_path / "x.npz"
    np.savez(path, **recording())
    data = path.read_bytes()
    for end in (0, 3, 40, len(data) // 2, len(data) - 30):
        path.write_bytes(data[:end])
        with pytest.raises(PhasorError):
            verify(ROPE, path)
    with pytest.raises(PhasorError, match="does not exist"):
        verify(ROPE, tmp_path / "none.npz")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("q.npy", b"no array")
    with pytest.raises(PhasorError, match="damaged"):
        verify(ROPE, path)
    save_file({"q": np.zeros(3, np.float32)}, tmp_path / "x.safetensors")
    whole = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(whole[:-4])
    with pytest.raises(PhasorError, match="truncated"):
        verify(ROPE, tmp_path / "x.safetensors")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_file_with_wrong_bytes_is_read_or_refused(save, tmp_path):
    """Any byte, or several: an answer or a PhasorError, never another one."""
    rope = Rope(head_dim=8, pairing="half")
    x, y = map(np.float32, vectors(rope))
    save(tmp_path / "a.npz", positions=np.arange(TOKENS), q=x, q_rotated=y)
    data = np.fromfile(tmp_path / "a.npz", np.uint8)
    rng = np.random.default_rng(0)
    for _ in range(60):
        wrong = data.copy()
        wrong[rng.integers(len(data), size=rng.integers(1, 4))] = rng.integers(256)
        wrong.tofile(tmp_path / "b.npz")
        with suppress(PhasorError):
            verify(rope, tmp_path / "b.npz")


def test_a_permuted_or_twice_rotated_recording_is_told():
    """A permuted or twice rotated recording is told."""
    arrays = recording()
    order = np.random.default_rng(1).permutation(TOKENS)
    assert "restart" in names(verify(ROPE, arrays | {"positions": np.arange(TOKENS)[order]}))
    twice = rotate(np.float64(arrays["q_rotated"]), np.arange(TOKENS), ROPE, "float32")
    assert names(verify(ROPE, arrays | {"q_rotated": np.float32(twice)})) == ["twice"]


@pytest.mark.slow
def test_a_large_file_is_read_in_parts(tmp_path):
    """A large file is read in parts."""
    tokens = 40_000
    x = np.random.default_rng(0).standard_normal((tokens, 8, 64)).astype(np.float32)
    cos, sin = (np.float32(t)[:, None] for t in _rows(tokens))
    first, second = x[..., :32], x[..., 32:]
    y = np.concatenate([first * cos - second * sin, first * sin + second * cos], -1)
    save_file({"positions": np.arange(tokens), "q": x, "q_rotated": y}, tmp_path / "x.safetensors")
    tracemalloc.start()
    assert not verify(ROPE, tmp_path / "x.safetensors")
    assert tracemalloc.get_traced_memory()[1] < x.nbytes  # of 160 MB in the file
    tracemalloc.stop()


def _rows(tokens):
    steps = np.array([float(f) for f in oracle.frequencies(ROPE)])
    angles = np.arange(tokens)[:, None] * steps
    return np.cos(angles), np.sin(angles)


def test_the_command_says_it_and_exits_with_1(tmp_path):
    """The command says it and exits with 1."""
    rope = next(iter(preset("llama-3.1-8b").ropes))
    positions = np.arange(40)
    x = np.random.default_rng(0).standard_normal((40, 2, 128)).astype(np.float32).astype(np.float64)
    for base, status in ((500_000.0, 0), (10_000.0, 1)):
        wrong = Rope(head_dim=128, pairing="half", base=base, scaling=rope.scaling)
        y = np.float32(rotate(x, positions, wrong, "float32"))
        np.savez(tmp_path / "x.npz", positions=positions, q=np.float32(x), q_rotated=y)
        arguments = ["verify", "llama-3.1-8b", str(tmp_path / "x.npz")]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == status, result.output
        assert ("Base: 10000 instead of 500000." in result.output) == bool(status)
        plain = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).output)
        assert plain["differ"] == bool(status)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_numbers_of_a_coarser_dtype_are_held_to_its_rounding(dtype):
    """A program that computes in bfloat16 is recorded in float32, or in float64."""
    x, _ = vectors()
    x = rounded(x, dtype)
    y = rotate(x, np.arange(TOKENS), ROPE, dtype, stepwise=True, float32_angles=True)
    assert not verify(ROPE, {"positions": np.arange(TOKENS), "q": x, "q_rotated": y})


@pytest.mark.slow
def test_a_function_has_to_apply_the_factor():
    """A function has to apply the factor, and axes in their order."""
    yarn = Rope(head_dim=64, pairing="half", scaling=Yarn(factor=4.0, original_max_positions=4096))
    factor = yarn.attention_factor
    with pytest.raises(AssertionError, match="Factor: missing"):
        assert_rotates(turn_as(yarn), yarn)
    assert_rotates(lambda x, positions: np.float32(factor) * turn_as(yarn)(x, positions), yarn)
    planes = Rope(head_dim=64, pairing="half", axes=Axial((16, 16)))

    def exchanged(x, positions):
        places = positions[:, ::-1].tolist()
        pairs = zip(np.asarray(x, np.float64), places, strict=True)
        return np.float32(np.stack([oracle.turned(head, place, planes) for head, place in pairs]))

    with pytest.raises(AssertionError, match="Axes: coordinates"):
        assert_rotates(exchanged, planes)


def test_a_function_that_ends_says_so_and_can_be_asked_below():
    """Its table has 600 rows."""

    def short(x, positions):
        if max(positions) >= 600:
            raise IndexError("no such row")
        return turn_as(ROPE)(x, positions)

    with pytest.raises(PhasorError, match=r"positions 0 to 4095.*no such row.*max_position"):
        assert_rotates(short, ROPE)
    assert_rotates(short, ROPE, max_position=599)


def test_assert_rotates_raises_the_report():
    """`assert_rotates` raises the report."""
    assert_rotates(recording(), ROPE)
    with pytest.raises(AssertionError, match="Pairing: interleaved instead of half"):
        assert_rotates(recording(OTHER), ROPE)
    with pytest.raises(AssertionError, match="Pairing: interleaved instead of half"):
        assert_rotates(turn_as(OTHER), ROPE)
    assert_rotates(turn_as(ROPE), ROPE)


@pytest.mark.slow
def test_a_function_is_asked_about_a_model_of_one_kind_of_layers():
    """As about its rope; of several kinds one layer's rope is asked for."""
    layers = LayerRopes(name="two", layer_kinds=("a", "none"), kinds={"a": ROPE, "none": None})
    assert_rotates(turn_as(ROPE), replace(layers, layer_kinds=("a", "a")))
    with pytest.raises(PhasorError, match="or give the rope of one"):
        assert_rotates(turn_as(ROPE), layers)
    with pytest.raises(AssertionError, match="Pairing: interleaved instead of half"):
        assert_rotates(turn_as(OTHER), LayerRopes(name="a", layer_kinds=("a",), kinds={"a": ROPE}))
    with pytest.raises(PhasorError, match=r"ropes\[0\]"):
        diff(layers, turn_as(ROPE))


def test_an_array_of_another_size_than_its_header_announces_is_refused(tmp_path):
    """A stored one would be read on into the next."""
    path = tmp_path / "a.npz"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": (4, 2, 128)}
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("q.npy", header.getvalue() + bytes(64))
        archive.writestr("q_rotated.npy", header.getvalue() + bytes(4096))
    with pytest.raises(
        PhasorError, match=r"q must have the [0-9]+ bytes that its header announces"
    ):
        verify(ROPE, path)


def test_masked_arrays_are_refused_wherever_arrays_are_taken():
    """Their masks would be lost."""
    masked = np.ma.masked_array(np.ones((2, 1, 8)), mask=True)
    places = np.ma.masked_array([1, 2], mask=[True, False])
    rope, x = Rope(head_dim=8, pairing="half"), np.ones((2, 1, 8))
    for call in (
        lambda: phasor.numpy.rotate(masked, [1, 2], rope),
        lambda: phasor.numpy.rotate(x, places, rope),
        lambda: phasor.numpy.change_pairing(masked, "half", "interleaved"),
        lambda: phasor.positions.packed(places),
        lambda: phasor.torch.rotate(torch.ones(2, 1, 8), places, rope),
        lambda: verify(rope, {"positions": places, "q": x, "q_rotated": x}),
    ):
        with pytest.raises(PhasorError, match="must be an array without a mask, got a MaskedArray"):
            call()
