"""`LayerRopes` is a sequence of the ropes of a model's layers."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from phasor import LayerRopes, QueryFactor, Rope, SpecError, diff, preset
from phasor.angles import wavelengths
from phasor.axes import Axial, InterleavedSections, Sectioned
from phasor.layers import NamedRope, summarize
from phasor.numpy import rotate
from phasor.scaling import DynamicNTK, Linear, Yarn
from phasor.torch import rotate_qk

LOCAL = Rope(head_dim=8, pairing="half")
GLOBAL = Rope(head_dim=8, pairing="half", base=1e6, scaling=Linear(factor=8.0))
RULE = DynamicNTK(factor=2.0, original_max_positions=64)
KINDS = {"local": LOCAL, "global": GLOBAL, "nope": None}
ORDER = ("local", "local", "global", "nope")


def gemma() -> LayerRopes:
    """Four layers of three kinds."""
    return LayerRopes(name="toy", layer_kinds=ORDER, kinds=KINDS, context=4096)


def test_a_layer_has_the_rope_of_its_kind() -> None:
    """Indexing from both ends, slices, length and iteration, as of any sequence."""
    ropes = gemma()
    assert [ropes[i] for i in range(4)] == [LOCAL, LOCAL, GLOBAL, None]
    assert (ropes[-1], ropes[-2]) == (None, GLOBAL)
    assert ropes[1:3] == (LOCAL, GLOBAL)
    assert ropes[::-1] == (None, GLOBAL, LOCAL, LOCAL)
    assert list(ropes) == [LOCAL, LOCAL, GLOBAL, None]
    assert len(ropes) == 4
    assert GLOBAL in ropes
    assert ropes.index(GLOBAL) == 2


@pytest.mark.parametrize("index", [4, -5])
def test_a_layer_that_does_not_exist_is_an_index_error(index: int) -> None:
    """Which is also what ends iteration."""
    with pytest.raises(IndexError):
        gemma()[index]


def test_a_list_of_ropes_is_answered_with_the_fields() -> None:
    """Whose example makes a model of the ropes that came."""
    with pytest.raises(SpecError, match="takes keyword arguments only, got \\[Rope") as caught:
        LayerRopes([LOCAL, None])  # type: ignore[call-arg]
    example = str(caught.value).split(": ", 1)[1]
    made = eval(example, {"LayerRopes": LayerRopes, "rope": LOCAL})
    assert list(made) == [LOCAL, None]


PARTIAL = replace(GLOBAL, rotary_dim=4)
#: By field, a rope that differs from it in that field alone; explicit frequencies have no base.
OTHERS: dict[str, Rope] = {
    name: replace(PARTIAL, **{name: value})
    for name, value in {
        "head_dim": 10,
        "pairing": "interleaved",
        "base": 1e5,
        "rotary_dim": 6,
        "rotary_start": 2,
        "scaling": Yarn(factor=8.0, original_max_positions=64),
        "axes": Sectioned((1, 1)),
        "direction": -1,
        "pairing_out": "interleaved",
        "inv_freq_dtype": "float32",
    }.items()
} | {
    "explicit_inv_freq": Rope(
        head_dim=8, pairing="half", rotary_dim=4, explicit_inv_freq=(1.0, 0.5)
    )
}


def test_ropes_that_differ_do_not_look_alike() -> None:
    """Whichever field it is: all summaries are different, on one line, and say the kind of axes."""
    assert set(OTHERS) == {field.name for field in fields(Rope)}
    said = [summarize(rope) for rope in (LOCAL, GLOBAL, PARTIAL, *OTHERS.values())]
    assert len(set(said)) == len(said)
    assert not any("\n" in text for text in said)
    layouts = [Sectioned((1, 3)), Axial((1, 3)), Axial((2, 2)), InterleavedSections((2, 2))]
    texts = {summarize(replace(LOCAL, axes=layout)) for layout in layouts}
    assert len(texts) == len(layouts)


def test_a_model_prints_the_axes_the_sign_and_the_slice() -> None:
    """In the line of their kind; what is plain is not said."""
    odd = replace(LOCAL, rotary_dim=4, rotary_start=2, direction=-1, axes=Sectioned((1, 1)))
    ropes = LayerRopes(name="toy", layer_kinds=("odd", "plain"), kinds={"odd": odd, "plain": LOCAL})
    _, of_odd, of_plain = str(ropes).splitlines()
    assert of_odd == (
        "  odd (1 layers): half pairs, 4 of 8 coordinates from 2 on, base 10000, "
        "Sectioned axes of 1, 1 pairs, clockwise"
    )
    assert of_plain == "  plain (1 layers): half pairs, 8 coordinates, base 10000"


def test_the_different_ropes_come_once_each() -> None:
    """In the order of the kinds, without the layers that have none."""
    twice = {"a": LOCAL, "b": GLOBAL, "c": Rope(head_dim=8, pairing="half"), "d": None}
    ropes = LayerRopes(name="toy", layer_kinds=("a", "b", "c", "d"), kinds=twice)
    assert ropes.ropes == (LOCAL, GLOBAL)


def test_kinds_cannot_be_changed() -> None:
    """Neither through the view nor through the dict it was made of."""
    kinds: dict[str, Any] = dict(KINDS)
    ropes = LayerRopes(name="toy", layer_kinds=ORDER, kinds=kinds)
    kinds["local"] = None
    assert ropes[0] == LOCAL
    with pytest.raises(TypeError):
        ropes.kinds["local"] = None  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layer_kinds": ()}, "layer_kinds must name the kind of at least one layer, got none"),
        (
            {"layer_kinds": ("local", "swa", "mla")},
            "layer_kinds names ['mla', 'swa'], which kinds does not describe",
        ),
        (
            {"kinds": {"local": "a", "global": None}, "layer_kinds": ("local",)},
            "kinds['local'] must be a Rope or None, got 'a'",
        ),
        ({"context": 0}, "context must be a whole number >= 1, got 0"),
        ({"num_heads": 1.5}, "num_heads must be a whole number >= 1, got 1.5"),
        ({"num_kv_heads": True}, "num_kv_heads must be a whole number >= 1, got True"),
        (
            {"auxiliary_ropes": (("mtp", 1, 2),)},
            "auxiliary_ropes[0] must be a NamedRope, got ('mtp', 1, 2)",
        ),
        (
            {"auxiliary_ropes": (NamedRope("mtp", None, (6,)),)},  # pyright: ignore[reportArgumentType]
            "auxiliary_ropes[0].rope must be a phasor.Rope, got None",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_layers_that_mean_nothing_are_refused(change: dict[str, Any], text: str) -> None:
    """With the field that is wrong."""
    fields: dict[str, Any] = {"name": "toy", "layer_kinds": ORDER, "kinds": KINDS} | change
    with pytest.raises(SpecError) as caught:
        LayerRopes(**fields)
    assert str(caught.value) == text


def yarn(all_dim: float) -> Rope:
    """DeepSeek's YaRN at 40, with ``all_dim`` of its temperature on the softmax."""
    law = Yarn(factor=40.0, original_max_positions=4096, mscale_all_dim=all_dim)
    return Rope(head_dim=8, pairing="half", scaling=law)


@pytest.mark.parametrize(
    ("kinds", "factor"),
    [
        pytest.param({"a": yarn(1.0)}, "1.87385420709", id="deepseek-v3"),
        pytest.param({"a": yarn(0.707)}, "1.58962616512", id="deepseek-v2"),
        pytest.param({"a": yarn(1.0), "b": None}, "1.87385420709", id="layers-without-rope"),
        pytest.param({"a": LOCAL, "b": GLOBAL}, "1.00000000000", id="gemma"),
        pytest.param({"a": None}, "1.00000000000", id="no-rope-at-all"),
        pytest.param({"a": replace(LOCAL, scaling=RULE)}, "1.00000000000", id="a-rule"),
    ],
)
def test_the_softmax_factor_is_the_models(kinds: dict[str, Rope | None], factor: str) -> None:
    """What DeepSeek's mscale_all_dim puts there, and 1 elsewhere."""
    ropes = LayerRopes(name="toy", layer_kinds=tuple(kinds), kinds=kinds)
    assert f"{ropes.softmax_factor:.11f}" == factor


@pytest.mark.parametrize(
    ("name", "attention", "softmax", "logits"),
    [
        # 0.1 ln 32 + 1 = 1.34657359, its square 1.81326043; 0.1 ln 40 + 1 = 1.36888795
        ("gpt-oss-20b", "1.34657359", "1.00000000", "1.81326043"),
        ("deepseek-v3", "1.00000000", "1.87385421", "1.87385421"),
    ],
)
def test_a_softmax_factor_means_one_thing(
    name: str, attention: str, softmax: str, logits: str
) -> None:
    """Of a rope and of its layers: the part outside cos and sin."""
    ropes = preset(name)
    for rope in ropes.ropes:
        assert f"{rope.attention_factor:.8f}" == attention
        assert f"{rope.logit_factor:.8f}" == logits
        assert f"{rope.softmax_factor:.8f}" == f"{ropes.softmax_factor:.8f}" == softmax


def test_layers_that_disagree_on_the_softmax_have_no_common_factor() -> None:
    """One number for the model would be wrong for some layer."""
    kinds = {"a": yarn(1.0), "b": LOCAL}
    with pytest.raises(SpecError) as caught:
        _ = LayerRopes(name="toy", layer_kinds=("a", "b"), kinds=kinds).softmax_factor
    assert str(caught.value) == (
        "the layers of toy multiply their softmax scale by different factors (1, 1.87385); "
        "read each rope's softmax_factor"
    )


def test_layer_ropes_can_be_copied_and_pickled() -> None:
    """A module that holds them can be deep-copied, and sent to another process."""
    ropes = preset("gemma-3-4b")
    for twin in (copy.deepcopy(ropes), pickle.loads(pickle.dumps(ropes))):
        assert list(twin) == list(ropes)
        assert twin.kinds == ropes.kinds
        assert twin.notes == ropes.notes
        labels = {"sliding": "sliding_attention", "full": "full_attention"}
        assert twin.in_config.labels == ropes.in_config.labels == labels


def test_a_model_where_a_rope_is_wanted_is_told_how_to_take_one() -> None:
    """By functions of NumPy, of torch and by attributes alike; hasattr is false."""
    ropes = preset("llama-3.1-8b")
    way = r"LayerRopes, the ropes of 32 layers: take ropes\[0\], or ropes\[layer\]$"
    uses = [
        lambda: rotate(np.zeros((1, 128)), 0, ropes),
        lambda: wavelengths(ropes),
        lambda: rotate_qk(torch.zeros(1, 1, 128), torch.zeros(1, 1, 128), 0, ropes),
        lambda: ropes.inv_freq,
    ]
    for use in uses:
        with pytest.raises(SpecError, match=way):
            use()
    with pytest.raises(SpecError, match=r"take one of its ropes, as ropes\[0\]"):
        diff(ropes, ropes[0])  # pyright: ignore
    assert not hasattr(ropes, "inv_freq")


def test_what_neither_a_model_nor_a_rope_has_is_an_ordinary_error() -> None:
    """Python's own, without a hint that would lead astray."""
    with pytest.raises(
        AttributeError, match=r"^'LayerRopes' object has no attribute 'wavelength'$"
    ):
        _ = preset("llama-3.1-8b").wavelength


STEPS = QueryFactor(strength=0.3, length=7, first=1)
FORMS = {
    "steps": lambda u: 1 + 0.3 * math.log(1 + math.floor(u)),
    "log": lambda u: 1 + 0.3 * math.log(max(u, 1)),
    "power": lambda u: (1 + u) ** 0.3,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("first", [0, 1])
def test_a_query_factor_is_its_formula_at_every_position(form: Any, first: int) -> None:
    """In float64 of any numbers; of tensors in their own precision; before 0 as at 0."""
    factor = QueryFactor(strength=0.3, length=7, first=first, form=form)
    places = [0, 5, 6, 7, 13, 14, 10**6, 7 * 2**40 - 1, 7 * 2**40]
    right = np.array([FORMS[form]((p + first) / 7) for p in places])
    assert np.abs(factor(places) / right - 1).max() < 1e-14
    assert np.abs(factor(torch.tensor(places), torch).numpy() / right - 1).max() < 1e-6
    assert factor(np.array([[200, 6]], np.uint8)).tolist() == [factor([200, 6]).tolist()]
    assert factor(-3 - first) == FORMS[form](0)
    assert (QueryFactor(form=form)(places) == 1).all()


def test_the_factor_of_a_layer_is_that_of_its_kind() -> None:
    """It is part of what is equal, kept, copied, shown and told apart."""
    ropes = replace(gemma(), query_factors={"nope": STEPS})
    assert [ropes.query_factor(i) == STEPS for i in (0, 2, 3, -1)] == [False, False, True, True]
    assert ropes.query_factor(0) == QueryFactor()
    assert ropes != gemma()
    assert pickle.loads(pickle.dumps(ropes)) == copy.deepcopy(ropes) == ropes
    assert "no rotation, queries times 1 + 0.3 ln(1 + floor((p + 1) / 7))" in str(ropes)
    assert not diff(ropes, ropes)
    said = str(diff(ropes, gemma()))
    assert "Queries: times 1 + 0.3 ln(1 + floor((p + 1) / 7)) and 1." in said
    assert "Only the" not in said
    with pytest.raises(SpecError, match=r"query_factors must name some of kinds, got \['other'\]"):
        replace(gemma(), query_factors={"other": STEPS})
    (kind, *_) = gemma().kinds
    with pytest.raises(SpecError, match=r"query_factors\['.*'\] must be a QueryFactor, got 2.0"):
        replace(gemma(), query_factors={kind: 2.0})


@pytest.mark.parametrize(
    ("field", "value"), [("length", 0), ("first", -1), ("strength", math.nan), ("form", "steep")]
)
def test_a_query_factor_names_the_field_that_is_wrong(field: str, value: Any) -> None:
    """With what came."""
    with pytest.raises(SpecError, match=f"{field} must be .*got {value!r}"):
        QueryFactor(**{"strength": 0.1, "length": 8} | {field: value})


def test_the_fields_of_a_query_factor_are_plain_numbers() -> None:
    """So that it is JSON after numbers of NumPy, and one factor has one text."""
    factor = QueryFactor(strength=np.float64(0.5), length=np.int64(8), first=np.int8(1))
    assert [type(getattr(factor, field.name)) for field in fields(factor)] == [float, int, int, str]
    assert repr(factor) == repr(QueryFactor(strength=0.5, length=8, first=1))
