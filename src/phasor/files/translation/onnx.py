"""ONNX: the caches and attributes of its operator RotaryEmbedding.

`phasor.torch.export` exports models that use it; `phasor.identification.from_cache` reads caches.
"""

from __future__ import annotations

from phasor.files.translation.target import ProgramSettings, Target, per_rope, table_settings
from phasor.rope import Rope


def _write(rope: Rope, context: int) -> ProgramSettings:
    return ProgramSettings(
        table_settings("flash-attn", rope, context)
        | {
            "interleaved": int(rope.pairing == "interleaved"),
            "rotary_embedding_dim": rope.rotary_dim,
        },
        "import onnx\nfrom phasor.torch import cos_sin_cache\n\n"
        "# x [batch, heads, seq, head_dim]; position_ids, int64 [batch, seq]\n"
        "tables = cos_sin_cache(\n"
        "    rope, max_positions, layout=layout, gain=gain, dtype=dtype  # of x, as torch.float32\n"
        ')  # "cos" and "sin" become the initializers cos_cache and sin_cache\n'
        "onnx.helper.make_node(\n"
        '    "RotaryEmbedding", ["x", "cos_cache", "sin_cache", "position_ids"], ["turned"],\n'
        "    interleaved=interleaved, rotary_embedding_dim=rotary_embedding_dim,\n"
        ")",
        ("If x is [batch, seq, heads * head_dim], give num_heads=heads too.",),
    )


TARGET = Target(
    name="onnx",
    program="the caches and attributes of the operator RotaryEmbedding (opset 23)",
    source="https://onnx.ai/onnx/operators/onnx__RotaryEmbedding.html",
    checked="run",
    package="onnxruntime",
    write=per_rope(_write),
    backwards=True,
)
