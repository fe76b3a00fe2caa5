"""Launch scripts of Megatron: their arguments, and the variables and lists in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from phasor import ConfigError, PhasorWarning
from phasor.axes import OneAxis, Sectioned
from phasor.files.reading import load

from ...each import each
from ..refusals import refused

SCRIPT = r"""
#!/bin/bash
export NUM_LAYERS=4   # as many as fit
HIDDEN="512"
GPT_ARGS=(
    --num-layers ${NUM_LAYERS} --hidden-size $HIDDEN
    --num-attention-heads 4
    --position-embedding-type mrope
    --mrope-section 16 24 24
    --rotary-base=1000000
    --rotary-percent 1.0 \
    --no-rope-freq 2
    --swiglu
)
torchrun "${DISTRIBUTED[@]}" pretrain_gpt.py "${GPT_ARGS[@]}" --bf16
"""


@each("suffix", [".sh", ".txt", ""])
def test_the_arguments_of_a_launch_script_are_read(suffix: str, tmp_path: Path) -> None:
    """With its variables, in an array, after an equals sign and without a value."""
    file = tmp_path / f"train{suffix}"
    file.write_text(SCRIPT)
    ropes = load(file)
    assert ropes.layer_kinds == ("rope", "nope", "rope", "nope")
    (rope,) = ropes.ropes
    assert (rope.base, rope.head_dim, rope.axes) == (1e6, 128, Sectioned((16, 24, 24)))
    file.write_text(SCRIPT.replace("=1000000", " $BASE"))
    with pytest.raises(
        ConfigError, match=r"--rotary-base must be .*\$BASE, a variable that the script"
    ):
        load(file)


@each(
    "before, value, layers",
    [
        ("", "${N:-4}", 4),
        ("N=${1:-4}; M=2", "$N", 4),
        ('export M=8 N="4"', "${N}", 4),
        ("if big\n  N=8\nelse\n  N=4\nfi", "$N", None),
        ("echo --num-layers 8", "4", None),
        ("N=4 # or\nN=4", "$N", 4),
        ("DENSE=1\nMOE=3", "$((DENSE + MOE))", 4),
        ("A=2; N=$(( $A * 3 - ${A} ))", "$N", 4),
    ],
)
def test_a_variable_of_a_script_has_one_value_or_is_refused(
    before: str, value: str, layers: int | None, tmp_path: Path
) -> None:
    """Its default counts where nothing sets it; of two sizes of a model none is taken."""
    file = tmp_path / "train.sh"
    sizes = "--hidden-size 512 --num-attention-heads 4 --position-embedding-type rope"
    file.write_text(f"{before}\npython train.py --num-layers {value} {sizes}\n")
    if layers:
        assert len(load(file)) == layers
    else:
        with pytest.raises(ConfigError, match=r"--num-layers must be .*got 8 or 4 "):
            load(file)


@each("text", ["([0]*1+[1]*1)*2", "[0]+[1]+([0]+[1])", "[0]*2+[1]*2", "[0] * 4"])
def test_a_script_may_repeat_a_list(text: str, tmp_path: Path) -> None:
    """As its program's own examples do; Python says here what that is."""
    file = tmp_path / "train.sh"
    sizes = "--num-layers 4 --hidden-size 512 --num-attention-heads 4"
    file.write_text(f'{sizes} --position-embedding-type rope --no-rope-freq "{text}" --bf16')
    kinds = ["nope" if item else "rope" for item in eval(text)]
    assert list(load(file).layer_kinds) == kinds
    config = {"num_layers": 4, "hidden_size": 512, "num_attention_heads": 4}
    config |= {"position_embedding_type": "rope", "no_rope_freq": text}
    assert list(load(config).layer_kinds) == kinds


def test_a_pattern_of_layers_may_stand_in_a_variable(tmp_path: Path) -> None:
    """As in Megatron's own examples; of two patterns none is taken, nor both after each other."""
    file = tmp_path / "train.sh"
    sizes = "--hidden-size 512 --num-attention-heads 4 --position-embedding-type rope"
    train = f"python train.py --hybrid-layer-pattern ${{P}} {sizes}\n"
    file.write_text(f'P="M-*|M/MM"\n{train}')
    assert load(file).layer_kinds == ("mamba", "mlp", "rope", "mamba")
    for two in (
        f"P=M-*\nP=MM*\n{train}",
        train.replace("${P}", "M-*") + train.replace("${P}", "MM*"),
    ):
        file.write_text(two)
        with refused("value", key="--hybrid-layer-pattern"):
            load(file)


def written(folder: Path, arguments: str, before: str = "") -> Path:
    """A script of a small model with these arguments as well."""
    file = folder / "train.sh"
    sizes = "--hidden-size 512 --num-attention-heads 4"
    file.write_text(f"{before}\ntorchrun pretrain.py {sizes} {arguments}\n")
    return file


def test_a_size_that_a_branch_sets_is_read_where_one_of_them_is_given(tmp_path: Path) -> None:
    """As the error says, which has both and no value that stands in no script."""
    layers, before = (
        "--num-layers $N --position-embedding-type rope",
        "if big\n  N=32\nelse\n  N=40\nfi",
    )
    with pytest.raises(ConfigError, match=r"got 32 or 40 \(the script has each; give one"):
        load(written(tmp_path, layers, before))
    assert len(load(written(tmp_path, layers, "N=40"))) == 40


def test_a_context_that_is_no_number_turns_nothing(tmp_path: Path) -> None:
    """It is left out with a note, where a size that no variable has is refused."""
    sizes = "--num-layers 4 --position-embedding-type rope --max-position-embeddings"
    ropes = load(written(tmp_path, f"{sizes} ${{LENGTH}}"))
    assert list(ropes) == list(load(written(tmp_path, f"{sizes} 4096")))
    assert ropes.context is None
    assert any("${LENGTH}, a variable that the script does not set" in n for n in ropes.notes)
    with pytest.raises(ConfigError, match=r"--num-layers must be .*\$\{LAYERS\}, a variable"):
        load(written(tmp_path, "--num-layers ${LAYERS} --position-embedding-type rope"))


def test_a_switch_before_a_variable_is_on(tmp_path: Path) -> None:
    """Further arguments stand in it as a rule."""
    ropes = load(written(tmp_path, "--num-layers 4 --use-rotary-position-embeddings $MORE"))
    assert ropes.layer_kinds == ("rope",) * 4


@each(
    "words",
    ["rope", "rope --use-rotary-position-embeddings", "mrope --use-rotary-position-embeddings"],
)
def test_sections_beside_a_rope_of_one_axis_are_noted(words: str, tmp_path: Path) -> None:
    """Megatron reads them in another type alone."""
    arguments = f"--num-layers 4 --mrope-section 24 20 20 --position-embedding-type {words}"
    ropes = load(written(tmp_path, arguments))
    assert ropes.ropes[0].axes == OneAxis()
    assert any("--mrope-section is for several axes" in note for note in ropes.notes)
    replaced = [note for note in ropes.notes if "(got mrope) is not read" in note]
    assert bool(replaced) == words.startswith("mrope")


def test_a_script_for_the_class_of_another_program_is_no_model_of_megatron(tmp_path: Path) -> None:
    """What Megatron assumes where nothing says a position embedding is not what that class does."""
    layers = "--num-layers 4 --micro-batch-size 1"
    with refused("value", key="--transformer-type"):
        load(written(tmp_path, f"{layers} --transformer-type huggingface"))
    assert load(written(tmp_path, f"{layers} --transformer-type megatron")).ropes == ()
    with pytest.warns(PhasorWarning, match="names another model"):
        load(written(tmp_path, f"{layers} --model-name-or-path THUDM/chatglm-6b"))


def test_a_script_without_arguments_is_called_one(tmp_path: Path) -> None:
    """And not JSON with a fault."""
    file = tmp_path / "train.sh"
    file.write_text("#!/bin/bash\npython train.py config.yaml\n")
    with refused("no_arguments"):
        load(file)
