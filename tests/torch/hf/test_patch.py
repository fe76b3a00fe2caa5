"""A patched model says what it said before, nobody else is touched, and unpatching is exact."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.tiny_models import installed_model_types, tiny_model

from phasor import Rope, SpecError
from phasor.errors import ConfigError, TensorError
from phasor.torch.hf import from_model, patch, unpatch

from ...rounding import GATHERED, UNIT, moved, rounding
from .live_models import WAYS, answers, difference, fresh, prefill, tokens, whole_models

#: Whole heads, normed heads, two kinds of layers, complex rows, latent attention, a table of sines.
EVERYDAY = ["llama", "qwen3", "gemma3_text", "llama4_text", "deepseek_v3", "gptj"]
#: What `patch` must refuse, and a word of its reason.
REFUSED = {
    "hunyuan_vl_text": "are not those that its config describes",
    "neomme": "are not those that its config describes",
    "qwen4_exp_text": "does more with cosines than rotate",
    "roformer": "has a rotation of its own",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", EVERYDAY)
def test_a_patched_model_says_the_same_in_float32(name: str, way: str) -> None:
    """In every way that it is run, to a rounding; generated tokens are the same ones."""
    model = fresh(name)
    before = WAYS[way](model)
    room = 0.0 if way == "generation" else rounding(model, WAYS[way])
    patch(model)
    assert before is not None
    assert difference(before, WAYS[way](model)) <= room


@pytest.mark.parametrize("name", EVERYDAY)
def test_unpatching_gives_back_every_class_on_the_same_modules(name: str) -> None:
    """The modules, their classes, what they hold and what the model says, bit for bit."""
    model = fresh(name)
    modules = list(model.named_modules())
    classes = [type(module) for _, module in modules]
    held = [sorted(module.__dict__) for _, module in modules]
    before = prefill(model)
    patch(model)
    assert [type(module) for _, module in modules] != classes
    unpatch(model)
    assert all(a is b for (_, a), (_, b) in zip(modules, model.named_modules(), strict=True))
    assert [type(module) for _, module in modules] == classes
    assert [sorted(module.__dict__) for _, module in modules] == held
    assert torch.equal(before, prefill(model))


def test_no_other_model_is_touched() -> None:
    """Neither another instance, nor the classes, nor the functions of their file."""
    from transformers.models.llama import modeling_llama as code

    function, method = code.apply_rotary_pos_emb, code.LlamaAttention.forward
    other = fresh("llama")
    patch(fresh("llama"))
    assert type(other.model.layers[0].self_attn) is code.LlamaAttention
    assert type(other.model.rotary_emb) is code.LlamaRotaryEmbedding
    assert code.apply_rotary_pos_emb is function
    assert code.LlamaAttention.forward is method


@pytest.mark.parametrize("name", EVERYDAY)
def test_the_report_names_every_layer(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A line is printed, the table on request; both are in what is returned."""
    model = fresh(name)
    ropes = from_model(model)
    patch(model)
    (line,) = capsys.readouterr().out.splitlines()
    assert f": phasor rotates in {len(ropes)} modules; positions come from " in line
    unpatch(model)
    report = patch(model, verbose=True)
    assert capsys.readouterr().out == f"{report}\n{report.table()}\n"
    assert str(report) == line
    assert len(report.table().splitlines()) == len(ropes) + 1
    assert [one.layer for one in report.layers] == list(range(len(ropes)))
    assert [one.rope for one in report.layers] == list(ropes)
    assert from_model(model).kinds == ropes.kinds


def test_the_rope_of_a_live_model_is_that_of_its_config() -> None:
    """Gemma 3 has one base for its sliding layers and another for the others."""
    ropes = from_model(fresh("gemma3_text"))
    assert {kind: rope.base for kind, rope in ropes.kinds.items() if rope} == {
        "full_attention": 1_000_000.0,
        "sliding_attention": 10_000.0,
    }
    assert from_model(fresh("deepseek_v3"))[0] == Rope(
        head_dim=64, pairing="interleaved", pairing_out="half", base=10_000.0
    )


def test_rows_of_half_width_reach_every_layer() -> None:
    """Attention is handed one row of cos and of sin a token, made once for all layers."""
    model = fresh("llama")
    patch(model)
    seen: list[Any] = []
    attention = model.model.layers[1].self_attn
    attention.register_forward_pre_hook(
        lambda _, __, words: seen.append(words["position_embeddings"]), with_kwargs=True
    )
    prefill(model)
    cos, sin = seen[0]
    assert cos is sin
    width = model.config.hidden_size // model.config.num_attention_heads // 2
    assert [row.shape for row in (cos.cos, cos.sin)] == [(1, 24, width)] * 2
    assert {row.dtype for row in (cos.cos, cos.sin)} == {torch.float32}


@pytest.mark.parametrize("name", EVERYDAY)
def test_a_patched_model_compiles_whole(name: str) -> None:
    """Without a graph break, and to the same logits."""
    model = fresh(name)
    before = prefill(model)
    patch(model)
    torch._dynamo.reset()
    whole = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert difference(before, whole(tokens(2, 24))[0]) <= rounding(model, prefill)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_a_patched_model_is_copied_and_pickled_as_it_is(name: str) -> None:
    """The copy is patched, says the same, and can be unpatched on its own."""
    model = fresh(name)
    patch(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(prefill(twin), prefill(model))
        unpatch(twin)
        with pytest.raises(ConfigError, match="must be patched"):
            unpatch(twin)
    unpatch(model)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gptj"])
def test_saved_files_are_the_same(name: str, tmp_path: Path) -> None:
    """Byte for byte, and what they hold loads as ever."""
    model = fresh(name)
    model.save_pretrained(tmp_path / "before")
    patch(model)
    model.save_pretrained(tmp_path / "after")
    files = {path.name: path.read_bytes() for path in (tmp_path / "before").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "after").iterdir()}
    again = type(model).from_pretrained(tmp_path / "after")
    again.set_attn_implementation("eager")
    assert difference(prefill(again.eval()), prefill(model)) <= rounding(model, prefill)


def test_a_trainer_trains_a_patched_model_as_before(tmp_path: Path) -> None:
    """The same losses in every step, with activations computed again."""
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in tokens(8, 32)]
    losses: dict[bool, list[float]] = {}
    for is_patched in (False, True):
        model = fresh("llama")
        if is_patched:
            patch(model)
        how = TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, report_to=[],
            logging_steps=1, use_cpu=True, save_strategy="no", disable_tqdm=True, seed=0,
            activation_checkpointing=is_patched,
        )  # fmt: skip
        trainer = Trainer(model=model, args=how, train_dataset=rows)  # pyright: ignore[reportArgumentType]
        trainer.train()
        losses[is_patched] = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    # a cross entropy moves by at most twice what its logits do
    room = 2 * rounding(fresh("llama"), prefill)
    assert losses[True] == pytest.approx(losses[False], rel=0, abs=room)
    assert len(losses[True]) == 3


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
@pytest.mark.parametrize("first", ["patch", "adapters"])
def test_adapters_go_on_before_or_after(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA wraps the projections of a patched model, and a wrapped model is patched."""
    import peft

    # peft refuses the torchao that torchtune wants; nothing here is quantized
    monkeypatch.setattr("peft.tuners.lora.torchao.is_torchao_available", lambda: False)
    model, other = fresh("llama"), fresh("llama")
    how = peft.LoraConfig(target_modules=["q_proj", "k_proj"], r=4, init_lora_weights=False)
    torch.manual_seed(0)
    plain = peft.get_peft_model(other, how)
    torch.manual_seed(0)
    if first == "patch":
        patch(model)
        model = peft.get_peft_model(model, how)
    else:
        model = peft.get_peft_model(model, how)
        patch(model)
    assert difference(prefill(plain), prefill(model)) <= rounding(plain, prefill)
    model(tokens(2, 8))[0].sum().backward()
    moved = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert moved
    assert all(p.grad is not None for p in moved)
    unpatch(model)
    assert difference(prefill(plain), prefill(model)) == 0


HOOKED = ["model.layers.1.self_attn", "model.rotary_emb"]


@pytest.mark.parametrize("path", HOOKED)
def test_a_hook_that_took_forward_is_refused(path: str) -> None:
    """It would call what was there before; nothing is changed then."""
    model = fresh("llama")
    module = model.get_submodule(path)
    before = module.forward
    module.forward = lambda *given, **words: before(*given, **words)
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ConfigError, match=rf"{path} .*hook .*nothing was changed"):
        patch(model)
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize("path", HOOKED)
def test_a_hook_that_keeps_forward_in_the_module_is_followed(path: str) -> None:
    """What it kept becomes that of the new class, and of the old one again."""
    model = fresh("llama")
    module = model.get_submodule(path)
    seen: list[str] = []

    def forward(*given: Any, **words: Any) -> Any:
        seen.append(path)
        return module.kept(*given, **words)

    module.kept, module.forward = module.forward, forward
    usual = type(module)
    patch(model)
    assert module.kept.__func__ is type(module).forward is not usual.forward
    assert difference(prefill(fresh("llama")), prefill(model)) <= rounding(fresh("llama"), prefill)
    unpatch(model)
    assert module.kept.__func__ is usual.forward
    assert difference(prefill(fresh("llama")), prefill(model)) == 0
    assert seen == [path, path]


@pytest.mark.parametrize(
    ("name", "path", "buffer"),
    [
        ("llama", "model.rotary_emb", "inv_freq"),
        ("gemma3_text", "model.rotary_emb", "sliding_attention_inv_freq"),
        ("gptj", "transformer.h.1.attn", "embed_positions"),
    ],
)
def test_changed_frequencies_are_refused(name: str, path: str, buffer: str) -> None:
    """A model whose frequencies somebody edited, in whichever layer, is not understood."""
    model = fresh(name)
    getattr(model.get_submodule(path), buffer).mul_(0.5)
    with pytest.raises(ConfigError, match=rf"{path} .*{buffer} is not what its config says"):
        patch(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_a_cast_is_no_change_of_frequencies(name: str, dtype: torch.dtype) -> None:
    """A model of any dtype is patched, and rotates by the same ropes."""
    model = fresh(name).to(dtype)
    ropes = [one.rope for one in patch(model).layers]
    assert ropes == list(from_model(fresh(name)))
    assert difference(prefill(fresh(name)), prefill(model)) < 0.05


def test_a_class_given_since_is_not_taken_away() -> None:
    """Whoever wrapped a patched module has to unwrap it first."""
    model = fresh("llama")
    patch(model)
    attention = model.model.layers[1].self_attn
    ours = type(attention)
    attention.__class__ = type("Wrapped", (ours,), {})
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn has been given another class"):
        unpatch(model)
    attention.__class__ = ours
    unpatch(model)


class OwnRotation(torch.nn.Module):
    """Attention as people write it, with its frequencies in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Whatever it does with them."""
        return x * self.inv_freq


def own_function(x: torch.Tensor) -> torch.Tensor:
    """A rotation by name."""
    return x


class CallsOwnFunction(torch.nn.Module):
    """Attention that calls a function for it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The name is all that is looked at."""
        apply_rope = own_function
        return apply_rope(x) if x.numel() else rotate_my_way(x)


rotate_my_way = own_function


@pytest.mark.parametrize("verb", [patch, from_model])
def test_a_model_without_rotation_has_nothing_to_replace(verb: Any) -> None:
    """GPT-2 learns its positions, and a linear layer knows none."""
    from transformers import GPT2Config, GPT2Model

    sizes: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 16}
    for model in (torch.nn.Linear(2, 2), GPT2Model(GPT2Config(**sizes))):
        with pytest.raises(ConfigError, match="there is nothing to replace") as error:
            verb(model)
        assert "rotate_qk" not in str(error.value)


@pytest.mark.parametrize(
    ("cls", "says"), [(OwnRotation, r"\(inv_freq\)"), (CallsOwnFunction, r"\(rotate_my_way\)")]
)
def test_a_rotation_of_ones_own_is_shown_the_way_to_rotate_qk(cls: Any, says: str) -> None:
    """The module is named, and what in it speaks of a rotation."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), cls())
    with pytest.raises(ConfigError, match=rf"and 1 \({cls.__name__}\) of Sequential.*{says}") as e:
        patch(model)
    assert "phasor.torch.rotate_qk(q, k, positions, rope)" in str(e.value)


def test_patching_twice_says_already(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing changes, and one call of `unpatch` undoes both."""
    model = fresh("llama")
    before = prefill(model)
    first = patch(model)
    classes = [type(module) for module in model.modules()]
    capsys.readouterr()
    again = patch(model)
    assert [type(module) for module in model.modules()] == classes
    assert capsys.readouterr().out == (
        "LlamaForCausalLM: phasor rotates in 2 modules already; nothing has changed\n"
    )
    assert (first.already, again.already) == (False, True)
    assert again.layers == first.layers
    with pytest.raises(SpecError, match="seq_len must be a whole number"):
        patch(model, seq_len=0)
    unpatch(model)
    assert torch.equal(before, prefill(model))


def test_another_length_for_a_patched_model_is_refused() -> None:
    """It would be ignored otherwise; the same one is said to be there already."""
    model = tiny_model("llama")
    rule = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config = copy.deepcopy(model.config)
    config.rope_parameters = rule
    model = type(model)(config)
    patch(model, seq_len=100_000)
    assert patch(model, seq_len=100_000).already
    with pytest.raises(ConfigError, match=r"seq_len must be as before, and model\.rotary_emb"):
        patch(model, seq_len=200_000)


def test_cosines_of_ones_own_are_refused() -> None:
    """A patched layer rotates by positions; rows that someone else made are not silently read."""
    model = fresh("llama")
    patch(model)
    rows = torch.ones(1, 3, 128), torch.zeros(1, 3, 128)
    with pytest.raises(TensorError, match="must come from a rotary embedding of the patched"):
        model.model.layers[0](torch.zeros(1, 3, 512), position_embeddings=rows)


#: Models of several parts of which one is refused, and a word of its reason.
PARTS_REFUSED = {
    "clvp": "makes cosines for it",
    "edgetam_video": "turns no pairs",
    "sam2_video": "turns no pairs",
    "sam3_tracker_video": "turns no pairs",
    "sam3_video": "turns no pairs",
}


@pytest.mark.slow
def test_every_model_of_several_parts_is_patched_or_refused_by_name() -> None:
    """Whole models as their configs' defaults make them, without memory; some cannot be made."""
    refused: dict[str, str] = {}
    names: list[str] = []
    for name, model in whole_models():
        names.append(name)
        try:
            patch(model)
        except ConfigError as error:
            refused[name] = str(error)
    print(f"{len(names) - len(refused)} models patched")
    # a default that no published config has is the config reader's to refuse
    unread = {name for name, says in refused.items() if "its config cannot be read" in says}
    assert set(refused) - unread == set(PARTS_REFUSED)
    assert [name for name, word in PARTS_REFUSED.items() if word not in refused[name]] == []
    assert len(names) - len(refused) >= 80


@pytest.mark.slow
def test_every_architecture_of_the_installed_transformers() -> None:
    """All that can be run at all say the same when patched, or are refused by name, unchanged."""
    wrong: dict[str, Any] = {}
    proved = 0
    # gradients and generation go through the same calls, as six architectures show above
    ways = {name: WAYS[name] for name in ("prefill", "decode", "left padding", "packing")}
    for name in installed_model_types():
        model = tiny_model(name)
        before = answers(model, ways)
        if "prefill" not in before:
            print(f"{name} does not run on tokens alone")
            continue
        plain = copy.deepcopy(model)
        try:
            patch(model)
        except ConfigError as error:
            if REFUSED.get(name, "?") not in str(error):
                wrong[name] = str(error)
            continue
        apart = {way: difference(said, ways[way](model)) for way, said in before.items()}
        # the last product alone gathers so much; the model is asked where that is too little
        beyond = {way: d for way, d in apart.items() if d > GATHERED * UNIT}
        close = {way: difference(before[way], ways[way](moved(plain))) for way in beyond}
        beyond = {way: d for way, d in beyond.items() if d > close[way]}
        if beyond or name in REFUSED:
            wrong[name] = beyond or "patched"
        proved += 1
    print(f"{proved} architectures proved")
    assert wrong == {}
    assert proved >= 60
