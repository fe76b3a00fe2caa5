"""Record what llama.cpp rotates, for ``phasor verify MODEL recording.npz --dims sd``.

``python examples/record_llama_cpp.py model.gguf recording.npz`` decodes one batch of tokens with an
evaluation callback, which sees the graph node by node: the last tensor of a name before an
operation ROPE is what goes into it. It was run with llama-cpp-python 0.3.36, and is for models
whose projections of queries and keys are tensors of their own. A GGUF file may have another pairing
than the checkpoint it was made of, so MODEL is the file itself.
"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path
from typing import Any

import llama_cpp  # pyright: ignore[reportMissingImports]
import numpy as np

TOKENS = 500

folder = Path(llama_cpp.__file__).parent
ggml = ctypes.CDLL(str(next(folder.rglob("libggml-base.so"))))
ggml.ggml_get_name.restype = ggml.ggml_op_desc.restype = ctypes.c_char_p
ggml.ggml_nbytes.restype = ctypes.c_size_t
ggml.ggml_backend_tensor_get.argtypes = [
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
]
recorded: dict[str, Any] = {"positions": np.arange(TOKENS)}
last: dict[str, Any] = {}


@llama_cpp.ggml_backend_sched_eval_callback
def keep(tensor: Any, ask: bool, _: Any) -> bool:
    """Keep queries and keys before and after their rotation."""
    tensor = ctypes.c_void_p(tensor)
    # "Qcur-3", or "Qcur_normed-3 (reshaped)" where queries are normalized before they are rotated
    named = re.match(r"([QK])cur\w*-(\d+)", ggml.ggml_get_name(tensor).decode())
    if ask or named is None:  # whether it is to be called again when this tensor is there
        return named is not None
    values = np.empty(ggml.ggml_nbytes(tensor) // 4, np.float32)
    ggml.ggml_backend_tensor_get(tensor, values.ctypes.data, 0, values.nbytes)
    side = f"layers.{named[2]}.{named[1].lower()}"
    if ggml.ggml_op_desc(tensor) == b"ROPE":
        recorded[side] = last[side]
        recorded[f"{side}_rotated"] = values.reshape(TOKENS, -1)
    last[side] = values.reshape(TOKENS, -1)
    return True


def main(model_file: str, recording: str) -> None:
    """Decode tokens 0 to 499 of the vocabulary in one batch, and write what was kept."""
    model = llama_cpp.llama_model_load_from_file(
        model_file.encode(), llama_cpp.llama_model_default_params()
    )
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = TOKENS
    params.cb_eval = keep
    context = llama_cpp.llama_init_from_model(model, params)
    tokens = (llama_cpp.llama_token * TOKENS)(*range(TOKENS))
    llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, TOKENS))
    np.savez(recording, **recorded)


if __name__ == "__main__":
    main(*sys.argv[1:])
