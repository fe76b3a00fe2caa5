"""YAML: its numbers are numbers, and what only looks like a config is refused by name."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from phasor import ConfigError, LayerRopes
from phasor.files.reading import load

from ...each import each
from ..refusals import refused

LITGPT = {
    "n_layer": "2",
    "n_head": "4",
    "n_embd": "512",
    "rotary_percentage": "1.0",
    "rope_base": "500000",
}


def text(**more: str) -> str:
    """A model_config.yaml, of values as they are written."""
    return "".join(f"{key}: {value}\n" for key, value in (LITGPT | more).items())


def read(path: Path, yaml: str | bytes) -> LayerRopes:
    """What `load` makes of a file with this text."""
    file = path / "model_config.yaml"
    file.write_bytes(yaml.encode() if isinstance(yaml, str) else yaml)
    return load(file)


@each(
    "base",
    ["1e6", "1E+6", "1.0e6", "1_000_000", "1000000.0", "0xF4240", "!!float 1000000", "1e+06"],
)
def test_a_number_is_one_in_every_spelling(base: str, tmp_path: Path) -> None:
    """PyYAML, after YAML 1.1, reads ``1e6`` as a text."""
    (rope,) = read(tmp_path, text(rope_base=base)).ropes
    assert rope.base == 1e6


@each(
    "value, says",
    [
        ("no", "got 'no'"),
        ("'500000'", "got '500000'"),
        ("${base}", r"got '\$\{base\}'"),
        ("${oc.env:BASE,10000}", r"got '\$\{oc\.env:BASE,10000\}'"),
        ("2026-11-23", "got '2026-11-23'"),
        ("!!python/name:math.pi ''", "got '.*python/name:math.pi'"),
        ("!!python/object/apply:os.system [ls]", "python/object/apply:os.system"),
        ("!scaled 5", "!scaled"),
        ("!!str 500000", "got '500000'"),
        (".inf", "got inf"),
        (".nan", "got nan"),
        ("[500000]", "got "),
    ],
)
def test_what_is_no_number_is_refused_under_its_key(value: str, says: str, tmp_path: Path) -> None:
    """A text, a date, an interpolation, and a tag of a program's own, which nothing runs."""
    with pytest.raises(ConfigError, match=f"rope_base must be.*{says}|{says}.*rope_base") as caught:
        read(tmp_path, text(rope_base=value))
    assert "rope_base" in str(caught.value)


@each("word, pairing", [("true", "interleaved"), ("True", "interleaved"), ("false", "half")])
def test_a_flag_is_true_or_false_alone(word: str, pairing: str, tmp_path: Path) -> None:
    """``no`` and ``off`` are texts since YAML 1.2, so they are refused and not guessed."""
    assert read(tmp_path, text(rope_interleave=word)).ropes[0].pairing == pairing
    with refused("value", key="rope_interleave", got="no"):
        read(tmp_path, text(rope_interleave="no"))


def test_tags_and_interpolations_elsewhere_are_of_no_account(tmp_path: Path) -> None:
    """The files of training runs are full of them."""
    more = text(out_dir="${root}/out", dtype="!!python/name:torch.bfloat16 ''", when="2026-11-23")
    assert read(tmp_path, more) == read(tmp_path, text())


def test_anchors_aliases_and_merges_are_what_they_name(tmp_path: Path) -> None:
    """Once written out."""
    base = "base: &base {n_layer: 9, n_head: 4}\nmore: &more {n_embd: 512}\n"
    own = "<<: [*base, *more]\nn_layer: 2\nrope_base: 500000\n"
    own += "rotary_percentage: &one 1.0\nother: *one\n"
    assert read(tmp_path, base + own) == read(tmp_path, text())


def laughs(levels: int) -> str:
    """A file that stands for ten to the power of its lines."""
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(lines) + "\n"


DAMAGED: dict[str, tuple[str | bytes, str]] = {
    "a billion laughs": (text() + laughs(9), "too_many: 20000"),
    "a list in itself": (text() + "a: &a [*a]\n", "endless_yaml"),
    "an object in itself": (text() + "a: &a {b: *a}\n", "endless_yaml"),
    "two documents": (text() + "---\nb: 1\n", "documents: 2"),
    "no document": ("", "empty"),
    "a list": ("- 1\n- 2\n", "no_object: an object of keys"),
    "a text": ("hello", "no_object: an object of keys"),
    "an object twice": (text(a="{b: 1}") + "a: {b: 2}\n", "key_twice: a"),
    "an unknown alias": ("a: *b\n", "not_parsed: YAML"),
    "an open bracket": ("a: [1, 2\n", "not_parsed: YAML"),
    "a tab": ("a:\n\t- 1\n", "not_parsed: YAML"),
    "a number of too many digits": (text(rope_base="9" * 5000), "not_parsed: YAML"),
    "a number of minutes in YAML 1.1": (
        "%YAML 1.1\n---\n" + text(rope_base="1:30"),
        "not_parsed: YAML",
    ),
    "a merge of a number": ("<<: 3\n", "yaml_merge: 3"),
    "a key that is a list": ("? [1]\n: 2\n", "yaml_key: tag:yaml.org,2002:seq"),
    "bytes that are no text": (b"a: \xff\n", "not_utf8"),
    "a zero byte": (b"a: \x00\n", "not_parsed: YAML"),
    "a deep file": ("[" * 4_000, "too_deep"),
    "a large file": ("#" * (2**20 + 1), "long_yaml: 256"),
}


@each("name", DAMAGED)
def test_a_damaged_file_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    """Never another exception, and never the memory of the machine."""
    yaml, says = DAMAGED[name]
    with refused(says) as caught:
        read(tmp_path, yaml)
    assert "model_config.yaml" in str(caught.value)


@pytest.mark.slow
def test_a_file_nested_thousands_deep_is_refused(tmp_path: Path) -> None:
    """After seconds, not with a RecursionError."""
    with refused("too_deep"):
        read(tmp_path, "[" * 5000)


def test_yaml_is_known_by_its_suffix_and_on_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in a folder that has no config.json."""
    ropes = read(tmp_path, "# written by litgpt\n" + text())
    assert load(tmp_path) == ropes
    for mark in ("", "\ufeff"):
        stream = io.BytesIO((mark + text()).encode())
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream))
        assert load("-") == ropes


def test_without_ruamel_the_error_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of the other extras."""
    missing: Any = None
    monkeypatch.setitem(sys.modules, "ruamel.yaml", missing)
    with refused("no_yaml: pip install 'phasor-rope[yaml]'"):
        read(tmp_path, text())


def test_a_key_that_nothing_reads_may_stand_twice(tmp_path: Path) -> None:
    """Programs take the last; of one that is read both values are told."""
    with refused(": rope_base") as caught:
        read(tmp_path, text() + "rope_base: 10000\n")
    assert "got 500000 and 10000" in str(caught.value)
    twice = "init_std: 0.1\ninit_std: 0.2\n"
    assert read(tmp_path, text() + twice) == read(tmp_path, text())
    with refused("unread: 1 and 2, because it appears twice", key="rope_zoom"):
        read(tmp_path, text() + "rope_zoom: 1\nrope_zoom: 2\n")
