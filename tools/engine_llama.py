"""llama.cpp for `tools.engines`: its own graph of a tiny model, on what `phasor.translate` writes.

llama-cpp-python is built from its source, without optimisation and without what is only for chats.
A file of random weights with the keys and tensors to try is loaded; an evaluation callback puts the
tokens to turn instead of the queries before the operation ROPE, and reads them after it.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
from tests.files.translation.jobs import Job, on_slice

from phasor.axes import InterleavedSections, Sectioned
from phasor.files.translation import TranslationError

PACKAGE = "llama-cpp-python"
OFF = ("GGML_NATIVE", "GGML_OPENMP", "GGML_CPU_REPACK", "GGML_LLAMAFILE", "LLAVA_BUILD",
       "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_TOOLS",
       "LLAMA_BUILD_SERVER")  # fmt: skip

#: By architecture, the tensors of a layer; those of which every file has one are not here.
_USUAL = "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down"
_NORMED = f"{_USUAL} attn_q_norm attn_k_norm"
_POST = "post_attention_norm post_ffw_norm"
LAYERS: Mapping[str, str] = {
    "deepseek2": "attn_norm attn_q attn_kv_a_mqa attn_kv_a_norm attn_k_b attn_v_b attn_output "
    "ffn_norm ffn_gate ffn_up ffn_down",
    "exaone": _USUAL,
    "gemma4": f"{_NORMED} {_POST}",
    "glm4": f"{_USUAL} {_POST}".replace("ffn_gate ", ""),
    "llama": _USUAL,
    "olmo2": f"{_NORMED} {_POST}".replace("attn_norm ", "").replace("ffn_norm ", ""),
    "phi3": _USUAL.replace("ffn_gate ", ""),
    "qwen3vl": _NORMED,
}
#: Those whose heads may be wider than what they rotate.
PARTIAL = {"gemma4", "glm4", "phi3"}
SMALL = 8  # any other size
TYPES = {"none": 0, "linear": 1, "yarn": 2}


#: By target, by how many units an angle is off more than that of the pair before it: ggml
#: multiplies it by the step, which is a rounded power, and rounds the product.
PER_PAIR = {"gguf": 2, "llama.cpp": 2}


def not_run(job: Job, architecture: str) -> TranslationError:
    """What is raised and printed where what was written is for none of `LAYERS`."""
    print(f"{job.ropes.name} is not run: that needs {architecture}")
    return TranslationError("not run")


def build(folder: Path) -> str:
    """Build the package into the folder, unless it is there; and its version."""
    if not list(folder.glob("*.dist-info")):
        with tempfile.TemporaryDirectory() as source:
            build_from(Path(source), folder)
    (info,) = folder.glob("*.dist-info")
    return f"{PACKAGE} {info.stem.rpartition('-')[2]}"


def build_from(source: Path, folder: Path) -> None:
    """Fetch the source and install what it makes, without what that requires."""
    pip = [sys.executable, "-m", "pip", "-q"]
    only_source = ["--no-deps", "--no-binary", PACKAGE]
    subprocess.run([*pip, "download", *only_source, "-d", source, PACKAGE], check=True)
    with tarfile.open(next(source.glob("*.tar.gz"))) as archive:
        archive.extractall(source, filter="data")
    (root,) = (path for path in source.iterdir() if path.is_dir())
    cmake = root / "CMakeLists.txt"  # which wants what chats need, whatever the options are
    text = cmake.read_text("utf-8")
    cmake.write_text(text.replace("(LLAMA_BUILD_COMMON ON", "(LLAMA_BUILD_COMMON OFF"), "utf-8")
    options = [f"-D{name}=OFF" for name in OFF]
    options += [f"-DCMAKE_{language}_FLAGS_RELEASE=-O0" for language in ("C", "CXX")]
    environment = {**os.environ, "CMAKE_ARGS": " ".join(options)}
    done = subprocess.run(
        [*pip, "install", "--no-deps", "--target", folder, root],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)


def sizes(arch: str, widths: list[int]) -> dict[str, Any]:
    """The keys of an architecture but those of rotation, by the width of a head of each layer."""
    width = widths[-1]
    keys: dict[str, Any] = {
        "block_count": len(widths), "context_length": 2**20, "embedding_length": width,
        "feed_forward_length": SMALL, "vocab_size": SMALL,
        "attention.head_count": 1, "attention.head_count_kv": 1,
        "attention.key_length": width, "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    if arch in ("gemma4", "olmo2"):
        keys["attention.sliding_window"] = 64
        keys["attention.sliding_window_pattern"] = [True, False]
    if arch == "gemma4":
        for name in ("key", "value"):
            keys[f"attention.{name}_length_swa"] = widths[0]
        keys["embedding_length_per_layer_input"] = 0
    if arch == "deepseek2":
        keys |= {
            "leading_dense_block_count": 1, "expert_feed_forward_length": SMALL,
            "expert_shared_count": 0, "attention.q_lora_rank": 0, "attention.kv_lora_rank": SMALL,
            "attention.key_length": width + SMALL, "attention.value_length": SMALL,
            "attention.key_length_mla": width + SMALL, "attention.value_length_mla": SMALL,
        }  # fmt: skip
    return keys


def shape(arch: str, name: str, width: int, head: int) -> tuple[int, ...]:
    """Of a tensor of a layer, by the width of the model and of the head."""
    if name.endswith("norm"):
        size = {"attn_kv_a_norm": SMALL, "attn_q_norm": head, "attn_k_norm": head}
        return (size.get(name, width),)
    shapes: dict[str, tuple[int, ...]] = {
        "attn_output": (width, head), "ffn_gate": (SMALL, width), "ffn_down": (width, SMALL),
        "ffn_up": (SMALL if "ffn_gate" in LAYERS[arch] else 2 * SMALL, width),
    }  # fmt: skip
    if arch == "deepseek2":
        shapes |= {
            "attn_q": (width + SMALL, width), "attn_kv_a_mqa": (width + SMALL, width),
            "attn_k_b": (1, SMALL, SMALL), "attn_v_b": (1, SMALL, SMALL),
            "attn_output": (width, SMALL),
        }  # fmt: skip
    return shapes.get(name, (head, width))


def write_model(path: Path, arch: str, widths: list[int], keys: dict[str, Any]) -> None:
    """A file of random weights; arrays among the keys are tensors."""
    width = widths[-1]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_tokenizer_model("none")
    methods = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string,
               list: writer.add_array}  # fmt: skip
    tensors = {
        "token_embd.weight": (SMALL, width), "output.weight": (SMALL, width),
        "output_norm.weight": (width,),
        **{f"blk.{layer}.{name}.weight": shape(arch, name, width, head)
           for layer, head in enumerate(widths) for name in LAYERS[arch].split()},
    }  # fmt: skip
    chance = np.random.default_rng(0)
    for name, dims in tensors.items():
        writer.add_tensor(name, chance.standard_normal(dims).astype(np.float32))
    for key, value in {**sizes(arch, widths), **keys}.items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, np.asarray(value, np.float32))
        else:
            methods[type(value)](f"{arch}.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pick(job: Job, keys: dict[str, Any], mode: str) -> tuple[str, dict[str, Any], list[str]]:
    """An architecture that reads the keys, the keys for it, and the kinds of its layers."""
    tensors = {key for key in keys if key.endswith(".weight")}
    rope, sliding = job.part.ropes[job.kind], "sliding" in job.kind
    if "attention.compress_rope_freq_base" in keys:
        raise not_run(job, "deepseek4")
    if tensors and mode in ("MROPE", "IMROPE"):
        raise not_run(job, f"rope type {mode} with tensors")
    if "rope.scaling.yarn_log_multiplier" in keys:
        return "deepseek2", keys, [job.kind]
    if len(job.part.ropes) > 1 and "rope.freq_base_swa" in keys:
        if mode != "NEOX":
            raise not_run(job, f"rope type {mode} with a base for sliding layers")
        kinds = sorted(job.part.ropes, key=lambda kind: "sliding" not in kind)
        same_base = keys["rope.freq_base"] == keys["rope.freq_base_swa"]
        if same_base and not tensors and rope.rotary_dim == rope.head_dim:
            return "olmo2", keys, kinds
        whole = np.ones(job.part.ropes[kinds[-1]].head_dim // 2)  # it asks for the tensor
        return "gemma4", {"rope_freqs.weight": whole, **keys}, kinds
    if sliding and "rope.freq_base_swa" in keys:
        keys = {**keys, "rope.freq_base": keys["rope.freq_base_swa"]}
    partial = rope.rotary_dim < rope.head_dim and not tensors
    choices = {
        "NORM": "glm4" if partial else "llama",
        "NEOX": "exaone" if "rope_freqs.weight" in tensors else "phi3",
        "MROPE": "glm4",
        "IMROPE": "qwen3vl",
    }
    return choices[mode], keys, [job.kind]


def say_nothing(_level: int, _text: bytes, _data: Any) -> None:
    """In place of the library's log."""


class Llama:
    """The library, and what its callback is to put in and has read."""

    def __init__(self, root: Path) -> None:
        package = ModuleType("llama_cpp")  # without its __init__, which imports what is not here
        package.__path__ = [str(root / "llama_cpp")]
        package.__file__ = str(root / "llama_cpp/__init__.py")
        sys.modules["llama_cpp"] = package
        self.cpp: Any = import_module("llama_cpp.llama_cpp")
        ggml = ctypes.CDLL(str(next((root / "llama_cpp").rglob("libggml-base.so"))))
        ggml.ggml_get_name.restype = ggml.ggml_op_desc.restype = ctypes.c_char_p
        ggml.ggml_nbytes.restype = ctypes.c_size_t
        to_and_from = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
        ggml.ggml_backend_tensor_get.argtypes = ggml.ggml_backend_tensor_set.argtypes = to_and_from
        self.layer, self.x, self.last = 0, np.empty((0, 0), np.float32), ctypes.c_void_p()
        self.turned: np.ndarray | None = None

        def look(address: int, ask: bool, _: Any) -> bool:
            tensor = ctypes.c_void_p(address)
            match = re.match(r"(?:Qcur\w*|q_pe)-(\d+)", ggml.ggml_get_name(tensor).decode())
            if match is None or int(match[1]) != self.layer:
                return True
            if ggml.ggml_op_desc(tensor) != b"ROPE":
                self.last = tensor
            elif ask:  # what it is to turn is there, perhaps as a part of wider rows
                row = self.x[0].nbytes
                token_bytes = (ggml.ggml_nbytes(self.last) - row) // (len(self.x) - 1)
                for token, values in enumerate(self.x):
                    offset = token * token_bytes
                    ggml.ggml_backend_tensor_set(self.last, values.ctypes.data, offset, row)
            else:
                self.turned = np.empty_like(self.x)
                ggml.ggml_backend_tensor_get(tensor, self.turned.ctypes.data, 0, self.x.nbytes)
            return True

        self.look = self.cpp.ggml_backend_sched_eval_callback(look)
        self.silence = self.cpp.llama_log_callback(say_nothing)
        self.cpp.llama_log_set(self.silence, None)
        self.cpp.llama_backend_init()

    def run(self, job: Job, inputs: dict[str, Any], flags: Mapping[str, Any]) -> np.ndarray:
        """The tokens, turned by a layer of a model with these keys and flags."""
        (mode,) = set(re.findall(r"rope type (\w+)", " ".join(job.part.notes)))
        arch, keys, kinds = pick(job, inputs, mode)
        self.layer = kinds.index(job.kind)
        ropes = [job.part.ropes[kind] for kind in kinds]
        widths = [rope.head_dim - rope.rotary_start for rope in ropes]
        if arch not in PARTIAL:
            widths = [rope.rotary_dim for rope in ropes]
        width = widths[self.layer]

        def turn(x: np.ndarray) -> np.ndarray:
            self.x, self.turned = np.ascontiguousarray(x[:, :width]), None
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "model.gguf"
                write_model(path, arch, widths, keys)
                self.decode(path, job, flags)
            assert self.turned is not None, arch
            return np.concatenate([self.turned, x[:, width:]], 1)

        return on_slice(job, turn)

    def decode(self, path: Path, job: Job, flags: Mapping[str, Any]) -> None:
        """Load the file and decode as many tokens as there are, from the job's position on."""
        cpp, count = self.cpp, len(job.x)
        model = cpp.llama_model_load_from_file(str(path).encode(), cpp.llama_model_default_params())
        assert model, "it does not load the file"
        params = cpp.llama_context_default_params()
        params.n_ctx = flags.get("-c", job.offset + count)
        params.n_batch = params.n_ubatch = SMALL
        params.n_threads = params.n_threads_batch = 1
        params.cb_eval = self.look
        # as the options of its programs are read
        notes = " ".join(job.part.notes)
        betas = re.search(r"--yarn-beta-fast (\S+) --yarn-beta-slow (\S+) as well", notes)
        if betas:
            params.yarn_beta_fast, params.yarn_beta_slow = map(float, betas.groups())
        if flags:
            params.rope_scaling_type = TYPES[flags["--rope-scaling"]]
            params.rope_freq_base = flags["--rope-freq-base"]
            params.rope_freq_scale = 1 / flags.get("--rope-scale", 1.0)
            params.yarn_orig_ctx = flags.get("--yarn-orig-ctx", 0)
            params.yarn_beta_fast = flags.get("--yarn-beta-fast", -1.0)
            params.yarn_beta_slow = flags.get("--yarn-beta-slow", -1.0)
        context = cpp.llama_init_from_model(model, params)
        batch = cpp.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for i in range(count):
            batch.token[i], batch.pos[i] = 0, job.offset + i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, True
        code = cpp.llama_decode(context, batch)
        cpp.llama_batch_free(batch)
        cpp.llama_free(context)
        cpp.llama_model_free(model)
        assert code == 0, f"llama_decode gives {code}"


def run_file(root: Path) -> Callable[[Job], np.ndarray]:
    """By the keys and tensors of a file."""
    llama = Llama(root)

    def run(job: Job) -> np.ndarray:
        settings = job.part.settings.items()
        return llama.run(job, {key.removeprefix("{arch}."): value for key, value in settings}, {})

    return run


def run_flags(root: Path) -> Callable[[Job], np.ndarray]:
    """By flags, with a file without scaling."""
    llama = Llama(root)

    def run(job: Job) -> np.ndarray:
        rope = job.part.ropes[job.kind]
        keys: dict[str, Any] = {"rope.freq_base": 10_000.0, "rope.dimension_count": rope.rotary_dim}
        if isinstance(rope.axes, (Sectioned, InterleavedSections)):
            keys["rope.dimension_sections"] = [*rope.axes.sections, 0, 0][:4]
        return llama.run(job, keys, job.part.settings)

    return run
