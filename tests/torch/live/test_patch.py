"""A patched model says what it said before, exactly; others are untouched, unpatching is exact."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.tiny_models import installed_model_types, tiny_model
from torch import Tensor, nn

from phasor import Rope, SpecError, load
from phasor.errors import ConfigError
from phasor.scaling import PerPair
from phasor.torch import _rotary_embeddings
from phasor.torch.live import check, from_model, patch, unpatch

from ...rounding import GATHERED, UNIT, moved, rounding
from ...sampling import SHARES
from .live_models import WAYS, answers, difference, fresh, prefill, tokens, whole_models

#: Whole heads, normed heads, two kinds of layers, complex rows, latent attention, a table of sines.
EVERYDAY = ["llama", "qwen3", "gemma3_text", "llama4_text", "deepseek_v3", "gptj"]
#: What `patch` must refuse, and a word of its reason.
REFUSED = {
    "hunyuan_vl_text": "differ from those that its config describes",
    "neomme": "differ from those that its config describes",
    "roformer": "has its own rotation",
}


def everything(model: nn.Module) -> list[dict[str, Any]]:
    """What each module holds, hooks included."""
    return [{name: copy.copy(it) for name, it in vars(m).items()} for m in model.modules()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", EVERYDAY)
def test_a_patched_model_says_the_same_in_float32(name: str, way: str) -> None:
    """In every way that it is run, to a rounding; generated tokens are the same ones."""
    model = fresh(name)
    before, room = WAYS[way](model), 0.0
    if before is not None and before.is_floating_point():
        room = rounding(model, WAYS[way])
    patch(model)
    assert difference(before, WAYS[way](model)) <= room


@pytest.mark.parametrize("name", EVERYDAY)
def test_unpatching_leaves_nothing_behind(name: str) -> None:
    """Every module holds what it held, and the model says what it said, bit for bit."""
    model = fresh(name)
    before, held = prefill(model), everything(model)
    patch(model)
    assert len(held) == len(everything(model))
    unpatch(model)
    for old, new in zip(held, everything(model), strict=True):
        assert old.keys() == new.keys()
        assert all(len(old[key]) == len(new[key]) for key in old if key.endswith("hooks"))
    assert torch.equal(prefill(model), before)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="must be patched"):
        unpatch(model)


def test_no_other_model_is_touched() -> None:
    """Neither another instance nor the class, of which a new model says what it ever did."""
    other = fresh("llama")
    before = prefill(other)
    patch(fresh("llama"))
    assert torch.equal(prefill(other), before)  # pyright: ignore[reportArgumentType]
    assert not other.model.rotary_emb._forward_hooks
    assert not type(other)(other.config).model.rotary_emb._forward_hooks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_cos_and_sin_are_exact_far_out(dtype: torch.dtype) -> None:
    """To half a unit of the model's dtype, as float64 has them; plain ones are far from that."""
    model = fresh("llama").to(dtype)
    ids = torch.tensor([[0, 1, 1000, 2**20 + 1, 2**22 - 1]])
    angles = ids[0].double()[:, None] * 10_000.0 ** (-torch.arange(64, dtype=torch.float64) / 64)
    patch(model)
    for row, expected in zip(
        model.model.rotary_emb(torch.zeros(1, 5, 1, dtype=dtype), ids),
        (angles.cos(), angles.sin()),
        strict=True,
    ):
        # float64 itself rounds an angle of 2**22 by 2**-31
        unit = max(torch.finfo(dtype).eps, 2.0**-30)
        assert row.dtype == dtype
        assert torch.equal(row[0, :, :64], row[0, :, 64:])
        assert float((row[0, :, :64].double() - expected).abs().max()) <= unit


def test_the_line_names_the_modules(capsys: pytest.CaptureFixture[str]) -> None:
    """It is printed, and is the text of what is returned; a second patch changes nothing."""
    model = fresh("llama")
    report = patch(model)
    line = "LlamaForCausalLM: cos and sin of model.rotary_emb are exact now"
    assert (capsys.readouterr().out, str(report)) == (f"{line}\n", line)
    again = patch(model)
    assert str(again).endswith("were already exact; nothing changed")
    assert (report.already, again.already) == (False, True)
    unpatch(model)
    assert not model.model.rotary_emb._forward_hooks
    with pytest.raises(SpecError, match="seq_len must be a whole number"):
        patch(model, seq_len=0)


def test_another_length_for_a_patched_model_is_refused() -> None:
    """It would be ignored otherwise; the same one is said to be there already."""
    rule = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = tiny_model("llama", {"rope_parameters": rule})
    patch(model, seq_len=100_000)
    assert patch(model, seq_len=100_000).already
    with pytest.raises(ConfigError, match=r"seq_len must be as before: model\.rotary_emb"):
        patch(model, seq_len=200_000)


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


def test_the_pairing_is_that_of_the_function_that_the_config_chooses() -> None:
    """DeepSeek's code has one for each."""
    model = fresh("deepseek_v3")
    model.config.rope_interleave = False
    assert [rope.pairing for rope in from_model(model) if rope] == ["half", "half"]


def test_models_in_a_list_are_patched_each_by_its_own_config() -> None:
    """Their ropes are asked for one by one."""
    first, second = tiny_model("llama"), tiny_model("llama")
    second.config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    second.model.rotary_emb.__init__(second.config)
    pair = nn.ModuleList([first, second])
    before = [prefill(model) for model in pair]
    with pytest.raises(ConfigError, match=r"1\.model\.rotary_emb and 0\.model"):
        from_model(pair)
    assert [rope.base for rope in from_model(second) if rope] == [500.0, 500.0]
    assert len(patch(pair).modules) == 2
    for model, said in zip(pair, before, strict=True):
        assert difference(said, prefill(model)) <= rounding(model, prefill)


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable[[Rope], Rope]) -> None:
    """Have every rope of a config read as if it were another."""

    def planted(config: Any, strict: bool) -> Any:
        read = load(config, strict=strict)
        kinds = {kind: rope and change(rope) for kind, rope in read.kinds.items()}
        return replace(read, kinds=kinds, auxiliary_ropes=())

    monkeypatch.setattr(_rotary_embeddings, "load", planted)


def other_base(rope: Rope) -> Rope:
    """A percent more, which the slowest frequencies show."""
    if rope.base is not None:
        return replace(rope, base=1.01 * rope.base)
    assert rope.explicit_inv_freq is not None
    return replace(rope, explicit_inv_freq=tuple(0.99 * f for f in rope.explicit_inv_freq))


def other_pairing(rope: Rope) -> Rope:
    """The pairing that it is not."""
    pairing = {"half": "interleaved", "interleaved": "half"}[rope.pairing]
    return replace(rope, pairing=pairing, pairing_out=None)  # pyright: ignore[reportArgumentType]


def other_factor(rope: Rope) -> Rope:
    """The same frequencies, and a percent more on cos and sin."""
    law = rope.at(10)
    factor = PerPair(factors=(1.0,) * rope.num_pairs, attention_factor=1.01 * law.attention_factor)
    return replace(rope, base=None, explicit_inv_freq=tuple(law.inv_freq.tolist()), scaling=factor)


PLANTED = [other_base, other_pairing, other_factor]


@pytest.mark.parametrize("change", PLANTED)
@pytest.mark.parametrize("name", EVERYDAY)
def test_what_a_model_does_not_compute_is_refused(
    name: str, change: Callable[[Rope], Rope], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Had its config been read so, nothing would be changed."""
    model = fresh(name)
    plant(monkeypatch, change)
    for function in (patch, from_model, check):
        with pytest.raises(ConfigError, match=r"cannot be made exact: .*; nothing was changed"):
            function(model)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", [*EVERYDAY, "gpt_oss"])
def test_a_patched_model_compiles_whole(name: str) -> None:
    """Without a graph break, and to the same logits."""
    model = fresh(name)
    before = prefill(model)
    patch(model)
    torch.compiler.reset()
    whole = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert difference(before, whole(tokens(2, 24))[0]) <= rounding(model, prefill)
    torch.compiler.reset()


def test_a_compiled_model_sees_that_it_is_patched_and_unpatched() -> None:
    """Compiled code does not look for hooks that came since, so it is made anew."""
    model = fresh("llama")
    far = torch.arange(24)[None] + 2**22

    @torch.no_grad()
    def said(model: Any) -> Tensor:
        return model(tokens(1, 24), position_ids=far)[0]

    plain, ours = said(model), copy.deepcopy(model)
    patch(ours)
    exact = said(ours)
    whole = torch.compile(model, backend="aot_eager")
    room = rounding(ours, said)
    assert difference(plain, exact) > 10 * room
    assert difference(plain, said(whole)) <= room
    patch(whole)
    assert difference(exact, said(whole)) <= room
    unpatch(whole)
    assert difference(plain, said(whole)) <= room
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_a_patched_model_is_copied_and_pickled_as_it_is(name: str) -> None:
    """The copy is patched, says the same, and can be unpatched on its own."""
    model = fresh(name)
    patch(model)
    said = prefill(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert difference(prefill(twin), said) == 0
        assert patch(twin).already
        unpatch(twin)
        with pytest.raises(ConfigError, match="must be patched"):
            unpatch(twin)
    assert difference(prefill(model), said) == 0
    unpatch(model)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gptj"])
def test_saved_files_are_the_same(name: str, tmp_path: Path) -> None:
    """Byte for byte, and from_pretrained loads what they hold as ever."""
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
@pytest.mark.parametrize("kind", ["LoRA", "adaption prompt"])
def test_adapters_go_on_before_or_after(
    kind: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wrap projections, or attention, which computes its queries again beside it."""
    import peft

    # peft refuses the torchao that torchtune wants; nothing here is quantized
    monkeypatch.setattr("peft.tuners.lora.torchao.is_torchao_available", lambda: False)
    how: Any = peft.LoraConfig(target_modules=["q_proj", "k_proj"], r=4, init_lora_weights=False)
    if kind == "adaption prompt":
        how = peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=2)
    torch.manual_seed(0)
    plain = peft.get_peft_model(fresh("llama"), how)
    torch.manual_seed(0)
    model: Any = fresh("llama")
    if first == "patch":
        patch(model)
    model = peft.get_peft_model(model, how)
    if first == "adapters":
        patch(model)
    assert difference(prefill(plain), prefill(model)) <= rounding(plain, prefill)
    unpatch(model)
    assert difference(prefill(plain), prefill(model)) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_a_cast_is_no_change_of_frequencies(name: str, dtype: torch.dtype) -> None:
    """A model of any dtype is patched, and rotates by the same ropes."""
    model = fresh(name).to(dtype)
    patch(model)
    assert list(from_model(model)) == list(from_model(fresh(name)))
    assert difference(prefill(fresh(name)), prefill(model)) < 0.05


class OwnRotation(nn.Module):
    """Attention as people write it, with its frequencies in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        """Whatever it does with them."""
        return x * self.inv_freq


@pytest.mark.parametrize("function", [patch, from_model, check])
def test_a_model_without_rotation_has_nothing_to_make_exact(function: Any) -> None:
    """GPT-2 learns its positions, and a linear layer knows none; others rotate by themselves."""
    from transformers import GPT2Config, GPT2Model

    sizes: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 16}
    for model in (nn.Linear(2, 2), GPT2Model(GPT2Config(**sizes))):
        with pytest.raises(ConfigError, match="there is nothing to make exact"):
            function(model)
    own = nn.Sequential(nn.Linear(4, 4), OwnRotation())
    with pytest.raises(ConfigError, match=r"1 \(OwnRotation\) .*own rotation \(.*\): call phasor"):
        function(own)


@pytest.mark.parametrize("function", [patch, unpatch, from_model, check])
@pytest.mark.parametrize("model", ["llama", None, 3, nn.Linear], ids=str)
def test_what_is_no_module_is_refused(function: Callable[[Any], Any], model: object) -> None:
    """With what was given instead."""
    with pytest.raises(ConfigError, match=r"model must be a torch\.nn\.Module.*, got "):
        function(model)


def test_towers_stay_as_they_are_and_are_named() -> None:
    """The language model beside them is patched; alone they are refused, with the reason."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    with torch.device("meta"):
        model = Qwen2VLForConditionalGeneration(Qwen2VLConfig())
    report = patch(model)
    assert report.modules == ("model.language_model.rotary_emb",)
    assert report.left == ("model.visual.rotary_pos_emb",)
    assert str(report).endswith("are exact now; unchanged: model.visual.rotary_pos_emb")
    assert len(from_model(model)) == model.config.text_config.num_hidden_layers
    with pytest.raises(ConfigError, match=r"rotary_pos_emb .* is not changed: positions in im"):
        patch(model.model.visual)


#: Models of several parts of which one is refused, and a word of its reason.
PARTS_REFUSED = {
    "clvp": "its forward takes",
    "musicflamingo": "its forward takes",
    "neucodec": "cannot be expressed by a Rope",
    "xcodec2": "cannot be expressed by a Rope",
}
#: Those in which nothing but pictures rotates.
PICTURES = ("edgetam_video", "glm5_next", "inkling2", "sam2_video", "sam3")


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_every_model_of_several_parts_is_patched_or_refused_by_name(share: int) -> None:
    """Whole models as their configs' defaults make them, without memory; some cannot be made."""
    refused: dict[str, str] = {}
    names: list[str] = []
    for name, model in whole_models(share):
        names.append(name)
        try:
            patch(model)
        except ConfigError as error:
            refused[name] = str(error)
    print(f"{len(names) - len(refused)} models patched")
    pictures = {name for name, says in refused.items() if "positions in images" in says}
    assert pictures == {name for name in names if name.startswith(PICTURES)}
    # a default that no published config has is the config reader's to refuse
    unread = {name for name, says in refused.items() if "its config cannot be read" in says}
    others = set(refused) - pictures
    expected = {name: word for name, word in PARTS_REFUSED.items() if name in names}
    assert others - unread <= expected.keys() <= others
    assert [name for name, word in expected.items() if word not in refused[name]] == []
    assert len(names) - len(refused) >= 3  # some twelve, in most eighths


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_every_architecture_of_the_installed_transformers(share: int) -> None:
    """All that can be run at all say the same when patched, or are refused by name, unchanged."""
    wrong: dict[str, Any] = {}
    proved = 0
    # gradients and generation go through the same calls, as six architectures show above
    ways = {name: WAYS[name] for name in ("prefill", "decode", "left padding", "packing")}
    for name in installed_model_types()[share::SHARES]:
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
    assert proved >= 16  # of nearly 20


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("change", PLANTED)
def test_no_architecture_passes_with_another_rope(
    change: Callable[[Rope], Rope], share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted in what is read of its config."""
    known: list[Any] = []
    for name in installed_model_types()[share::SHARES]:
        model = tiny_model(name)
        if name not in REFUSED:
            from_model(model)
            known.append((name, model.to("meta")))
    plant(monkeypatch, change)
    for name, model in known:
        with pytest.raises(ConfigError, match="cannot be made exact"):
            print(name, from_model(model))
    assert len(known) >= 18
