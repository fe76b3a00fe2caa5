"""The programs that `phasor.translate` writes for.

``PROGRAMS[target](job)`` turns the tokens of a `Job` with what was written, and returns float64
``[seq, head_dim]``. Those of ``libraries.py`` are the programs themselves, those of ``engines.py``
functions written from their documentation.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import engines, libraries
from .jobs import Job

#: Those that only the slow tests run.
IMPORT_LARGE_LIBRARIES = {"liger", "megatron", "meta", "onnx", "torchtune", "transformers"}

PROGRAMS: dict[str, Callable[[Job], np.ndarray]] = {
    "flash-attn": engines.flash_attn,
    "flashinfer": engines.flashinfer,
    "gguf": engines.gguf,
    "liger": libraries.liger,
    "llama.cpp": engines.llama_cpp,
    "megatron": libraries.megatron,
    "meta": libraries.meta,
    "mlx": libraries.mlx,
    "onnx": libraries.onnx,
    "rotary-embedding-torch": libraries.rotary_embedding_torch,
    "sglang": engines.sglang,
    "torchtune": libraries.torchtune,
    "transformer-engine": engines.transformer_engine,
    "transformers": libraries.transformers,
    "vllm": engines.vllm,
}
