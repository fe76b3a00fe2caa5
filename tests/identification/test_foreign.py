"""Other libraries' rotations through their public interfaces: each is recognised as what it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from phasor import Rope
from phasor.axes import InterleavedSections, Sectioned
from phasor.identification import identify
from phasor.scaling import DynamicNTK, Llama3, LongRope, Yarn

# other people's imports warn
pytestmark = pytest.mark.filterwarnings("ignore")


def llama(head_dim: int = 128, *, longest: int = 2048, **parameters: Any) -> tuple[Any, Any]:
    """Llama's function in transformers, and the module that makes its rows."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import (
        LlamaRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    settings = {"rope_type": "default", "rope_theta": 10_000.0} | parameters
    config = LlamaConfig(
        head_dim=head_dim, rope_parameters=settings, max_position_embeddings=longest
    )
    return apply_rotary_pos_emb, LlamaRotaryEmbedding(config)


def test_llama_in_transformers() -> None:
    """Halves of base 500000 with float32 angles."""
    function, table = llama(rope_theta=500_000.0)
    found = identify(function, 128, table=table)
    assert found.rope == Rope(head_dim=128, pairing="half", base=500_000.0)
    assert found.names() == {"angles-in-float32"}
    assert found.called == "torch arrays bhsd in float32 as (q k cos sin)"


def test_llama_3_in_transformers() -> None:
    """All four parameters."""
    settings = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    function, table = llama(**settings)
    law = Llama3(factor=8.0, original_max_positions=8192)
    found = identify(function, 128, table=table)
    assert found.rope == Rope(head_dim=128, pairing="half", base=500_000.0, scaling=law)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_in_transformers(truncate: bool) -> None:
    """gpt-oss's numbers, with its attention factor, and with the rounding it does without."""
    settings = {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": truncate,
    }
    function, table = llama(64, **settings)
    found = identify(function, 64, table=table)
    assert found.law == Yarn(factor=32.0, original_max_positions=4096, truncate=truncate)
    assert found.attention_factor == pytest.approx(0.1 * np.log(32) + 1, abs=1e-6)
    assert not found.keeps_norms


def test_a_cast_module_of_transformers_has_coarse_frequencies() -> None:
    """`.to(bfloat16)` takes the buffer of frequencies along."""
    import torch

    function, table = llama()
    found = identify(function, 128, table=table.to(torch.bfloat16))
    assert "frequencies-in-bfloat16" in found.names()
    assert found.rope is not None
    assert found.error < 1e-6
    assert "base 10000" in str(found)


def test_dynamic_scaling_of_transformers_remembers() -> None:
    """The rule is read, and that longer calls change later ones is said."""
    function, table = llama(rope_type="dynamic", factor=4.0, longest=64)
    found = identify(function, 128, table=table)
    assert {"depends-on-length", "remembers"} <= found.names()
    assert found.rule == DynamicNTK(factor=4.0, original_max_positions=64)


def test_longrope_of_transformers_is_a_rule() -> None:
    """Phi 3's two lists, the length between them to the token, and the factor on cos and sin."""
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding, apply_rotary_pos_emb

    rng = np.random.default_rng(0)
    short, long = (np.sort(rng.uniform(1, most, 48)).round(2).tolist() for most in (1.4, 60))
    settings = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": short,
                "long_factor": long, "original_max_position_embeddings": 600}  # fmt: skip
    config = Phi3Config(
        hidden_size=192, num_attention_heads=2, rope_parameters=settings,
        max_position_embeddings=600 * 32, original_max_position_embeddings=600,
    )  # fmt: skip
    found = identify(apply_rotary_pos_emb, 96, table=Phi3RotaryEmbedding(config))
    assert found.rule == LongRope(
        short_factors=tuple(short), long_factors=tuple(long), original_max_positions=600,
        factor=32.0,
    )  # fmt: skip
    assert "depends-on-length" in found.names()
    assert "remembers" not in found.names()
    assert "The rule is LongRoPE's" in str(found)


def test_deepseek_in_transformers() -> None:
    """Interleaved in, halves out."""
    _, table = llama(64)
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
        apply_rotary_pos_emb_interleave,
    )

    found = identify(apply_rotary_pos_emb_interleave, 64, table=table)
    assert found.rope == Rope(head_dim=64, pairing="interleaved", pairing_out="half")


def test_llama_4_in_transformers() -> None:
    """Rows of complex numbers, for queries and keys at once."""
    from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import (
        Llama4TextRotaryEmbedding,
        apply_rotary_emb,
    )

    settings = {"rope_type": "default", "rope_theta": 500_000.0}
    table = Llama4TextRotaryEmbedding(Llama4TextConfig(head_dim=128, rope_parameters=settings))
    found = identify(apply_rotary_emb, 128, table=table)
    assert found.rope == Rope(head_dim=128, pairing="interleaved", base=500_000.0)
    assert "(q k rows)" in (found.called or "")


def test_nanochat_in_transformers_turns_the_other_way() -> None:
    """Clockwise."""
    import transformers.models.nanochat.modeling_nanochat as nanochat

    _, table = llama(64)
    found = identify(nanochat.apply_rotary_pos_emb, 64, table=table)
    assert found.rope == Rope(head_dim=64, pairing="half", direction=-1)
    assert "direction" in found.names()


def test_hunyuan_vl_in_transformers_mixes_its_axes() -> None:
    """The two members of a pair follow different axes; equal coordinates, as of text, hide it."""
    import transformers.models.hunyuan_vl.modeling_hunyuan_vl as hunyuan
    from transformers.models.hunyuan_vl.configuration_hunyuan_vl import HunYuanVLTextConfig

    settings = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [16] * 4}
    config = HunYuanVLTextConfig(head_dim=128, rope_parameters=settings)
    table = hunyuan.HunYuanVLRotaryEmbedding(config)
    found = identify(hunyuan.apply_rotary_pos_emb, 128, table=table, n_axes=4)
    assert found.names() == {"members-on-different-axes"}
    assert found.rope is None


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_axes_of_qwen_vl_in_transformers(interleaved: bool) -> None:
    """Consecutive sections of Qwen2-VL, and those dealt out in turn of Qwen3-VL."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    if not interleaved:
        import transformers.models.qwen2_vl.modeling_qwen2_vl as qwen2
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig

        settings = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
        config = Qwen2VLTextConfig(hidden_size=256, num_attention_heads=2, rope_parameters=settings)
        table = qwen2.Qwen2VLRotaryEmbedding(config)

        def turned(q: Any, k: Any, cos: Any, sin: Any) -> Any:
            if hasattr(qwen2, "apply_multimodal_rotary_pos_emb"):
                return qwen2.apply_multimodal_rotary_pos_emb(q, k, cos, sin, [16, 24, 24])
            return qwen2.apply_rotary_pos_emb(q, k, cos, sin)

        found = identify(turned, 128, table=table, n_axes=3)
        assert found.rope == Rope(
            head_dim=128, pairing="half", base=1e6, axes=Sectioned((16, 24, 24))
        )
        return
    settings = {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    }
    table = Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(head_dim=128, rope_parameters=settings))
    found = identify(apply_rotary_pos_emb, 128, table=table, n_axes=3)
    assert found.rope == Rope(
        head_dim=128, pairing="half", base=5e6, axes=InterleavedSections((24, 20, 20))
    )


def test_torchtune() -> None:
    """Interleaved, a table of 4096 rows that raises, and -1 is its last."""
    from torchtune.modules import RotaryPositionalEmbeddings

    found = identify(RotaryPositionalEmbeddings(64, 4096, 10_000), 64)
    assert found.rope == Rope(head_dim=64, pairing="interleaved")
    assert found.table_end == 4096
    assert found.names() == {"table-end-raises", "negative-wraps", "angles-in-float32"}
    assert found.called == "torch arrays bshd in float32 as (x input_pos=positions)"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotary_embedding_torch(dtype: str) -> None:
    """It makes its positions in the dtype of what it turns."""
    from rotary_embedding_torch import RotaryEmbedding

    found = identify(RotaryEmbedding(64).rotate_queries_or_keys, 64, dtype=dtype)
    assert found.rope == Rope(head_dim=64, pairing="interleaved")
    assert ("positions-in-bfloat16" in found.names()) == (dtype == "bfloat16")


def onnx_model(head_dim: int, *, interleaved: bool, width: int) -> Any:
    """One operator of opset 23."""
    import onnx

    helper, kind = onnx.helper, onnx.TensorProto

    def value(name: str, dtype: int, rank: int) -> Any:
        return helper.make_tensor_value_info(name, dtype, [None] * rank)

    options = {"interleaved": int(interleaved)}
    if width < head_dim:
        options["rotary_embedding_dim"] = width
    names = ["x", "cos", "sin", "positions"]
    node = helper.make_node("RotaryEmbedding", names, ["y"], **options)
    inputs = [value(name, kind.FLOAT, rank) for name, rank in (("x", 4), ("cos", 2), ("sin", 2))]
    inputs.append(value("positions", kind.INT64, 2))
    graph = helper.make_graph([node], "rope", inputs, [value("y", kind.FLOAT, 4)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def onnx_run(engine: str, model: Any) -> Any:
    """What runs the model: the specification's own program, or onnxruntime."""
    if engine == "onnx":
        from onnx.reference import ReferenceEvaluator

        return ReferenceEvaluator(model).run
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run


@pytest.mark.parametrize("engine", ["onnx", "onnxruntime"])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("width", [32, 16])
def test_the_operator_of_onnx(engine: str, pairing: str, width: int) -> None:
    """Both values of `interleaved`, the whole head and half of it, and the end of its rows."""
    model = onnx_model(32, interleaved=pairing == "interleaved", width=width)
    run = onnx_run(engine, model)
    angles = np.arange(300)[:, None] * 10_000.0 ** (-np.arange(0, width, 2) / width)
    rows = {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}

    def turned(x: Any, positions: Any) -> Any:
        return run(None, {"x": x, "positions": positions} | rows)[0]

    found = identify(turned, 32)
    assert found.rope is not None
    assert (found.pairing, found.rotary_dim, found.base) == (pairing, width, 10_000)
    assert found.table_end == 300


@pytest.mark.parametrize("arrays", [None, "jax"])
def test_a_function_of_jax(arrays: str | None) -> None:
    """Compiled, with a jitted function's signature; NumPy's arrays will do."""
    import jax

    numpy = jax.numpy

    @jax.jit
    def turned(x: Any, positions: Any) -> Any:
        steps = 500.0 ** (-numpy.arange(0, 16, 2) / 16)
        angles = positions[..., None, None].astype(numpy.float32) * steps
        cos, sin = numpy.cos(angles), numpy.sin(angles)
        even, odd = x[..., 0::2], x[..., 1::2]
        pair = numpy.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
        return pair.reshape(x.shape)

    found = identify(turned, 16, arrays=arrays)
    assert (found.pairing, found.base, found.law) == ("interleaved", 500.0, None)
    # frequencies in float64 would give the same float32 angles, so nothing is said of them
    assert found.names() == {"angles-in-float32"}


def test_jax_in_bfloat16_loses_positions() -> None:
    """A sequence counted in the dtype of the activations."""
    import jax

    numpy = jax.numpy

    def turned(x: Any, positions: Any) -> Any:
        steps = 500.0 ** (-numpy.arange(0, 16, 2) / 16)
        angles = positions[..., None, None].astype(x.dtype).astype(numpy.float32) * steps
        first, second = numpy.split(x, 2, axis=-1)
        cos, sin = numpy.cos(angles), numpy.sin(angles)
        both = [first * cos - second * sin, second * cos + first * sin]
        return numpy.concatenate(both, -1).astype(x.dtype)

    found = identify(turned, 16, arrays="jax", dtype="bfloat16")
    assert "positions-in-bfloat16" in found.names()
    assert found.pairing == "half"
