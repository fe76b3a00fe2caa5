"""Launch scripts of Megatron: their arguments, and the variables and lists in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from phasor import ConfigError
from phasor.axes import Sectioned
from phasor.files.configs import load

from ...each import each

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
    with pytest.raises(ConfigError, match=r"--rotary-base must be .*True"):
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
        with pytest.raises(ConfigError, match=r"--num-layers must be .*got '8&4'"):
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
        with pytest.raises(ConfigError, match=r"--hybrid-layer-pattern must be .*M-\*&MM\*"):
            load(file)
