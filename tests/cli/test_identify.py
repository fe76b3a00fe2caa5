"""The command that identifies a function by its name."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from phasor import Rope, SpecError
from phasor import diff as diff_rotations
from phasor.cli.diff import diff
from phasor.cli.identify import find_function, identify, is_function
from phasor.numpy import rotate

ROPE = Rope(head_dim=16, pairing="half", base=500.0)


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    """A module of somebody's in the current folder."""
    text = """
import numpy as np
from phasor import Rope
from phasor.numpy import rotate
rope = Rope(head_dim=16, pairing="half", base=500.0)
def turned(x, positions):
    return rotate(x, positions, rope)
def late(x, positions):
    return rotate(x, positions + 1, rope)
def short(x, positions):
    return rotate(x, np.arange(50)[positions], rope)
class Holder:
    pass
number = 3
"""
    (tmp_path / "somebodys_rope.py").write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_named_function_is_explained():
    """In words."""
    done = CliRunner().invoke(identify, ["somebodys_rope:turned", "--head-dim", "16"])
    assert done.exit_code == 0
    assert "Frequencies are powers of base 500." in done.output


def test_a_named_function_is_described_as_json():
    """With its Rope."""
    arguments = ["somebodys_rope:late", "--head-dim", "16", "--dtype", "float64", "--json"]
    plain = json.loads(CliRunner().invoke(identify, arguments).output)
    assert Rope.from_dict(plain["rope"]) == ROPE
    assert plain["position_offset"] == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("somebodys_rope", "package.module:function"),
        ("no_such_module:turned", "cannot be imported"),
        ("somebodys_rope:twisted", "no 'twisted'"),
        ("somebodys_rope:Holder", "a function or an nn.Module instance"),
        ("somebodys_rope:number", "a function or an nn.Module instance"),
    ],
)
def test_a_name_of_nothing_is_refused(text, says):
    """With what is missing."""
    with pytest.raises(SpecError, match=says):
        find_function(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("def broken(:", "SyntaxError"),
        ("raise SystemExit(1)", "SystemExit: 1"),
        ("import no_such_module", "No module named 'no_such_module'"),
    ],
    ids=["raises", "cannot be read", "ends the program", "imports nothing"],
)
def test_a_module_that_cannot_be_imported_is_refused(tmp_path, text, says):
    """With its name and what it said, whatever that is."""
    name = f"bad_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text, "utf-8")
    with pytest.raises(SpecError, match=f"'{name}' cannot be imported.*{says}"):
        find_function(f"{name}:turned")


@pytest.mark.parametrize(
    ("text", "is_one"),
    [("a.b:c", True), ("a:b.c", True), ("llama-3-8b", False), ("./a:b", False), ("C:\\x", False)],
)
def test_functions_are_told_from_models(text, is_one):
    """By their form alone."""
    assert is_function(text) is is_one


def test_a_rope_and_a_function_part_where_they_do():
    """Position, pair and size, as text."""
    late, turned, short = (
        find_function(f"somebodys_rope:{x}") for x in ("late", "turned", "short")
    )
    found = diff_rotations(ROPE, late, context=4096)
    x = np.eye(16)[0]
    apart = np.linalg.norm(rotate(x, 0, ROPE) - rotate(x, 1, ROPE))
    assert (found.position, found.pair) == (0, 0)
    assert found.size == pytest.approx(apart)
    assert "position 0 in pair 0" in str(found)
    assert diff_rotations(turned, ROPE, context=4096) is None
    assert "refuses" in str(diff_rotations(ROPE, short, context=4096))


@pytest.fixture
def config(tmp_path):
    """A model whose rope the module's function does."""
    keys = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
            "num_key_value_heads": 4, "num_hidden_layers": 2, "rope_theta": 500.0,
            "max_position_embeddings": 4096}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(keys), "utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("function", "code", "says"),
    [("turned", 0, "agree wherever"), ("late", 1, "position 0 in pair 0")],
)
def test_diff_compares_a_model_with_a_function(config, function, code, says):
    """And says by its exit code whether they part."""
    done = CliRunner().invoke(diff, [config, f"somebodys_rope:{function}"])
    assert (done.exit_code, says in done.output) == (code, True)
    assert r"\n" not in done.output  # a cause and a distance are lines of their own


def test_diff_of_two_functions_needs_the_width_of_a_head():
    """No model says it."""
    both = ["somebodys_rope:turned", "somebodys_rope:late"]
    with pytest.raises(SpecError, match="--head-dim"):
        CliRunner().invoke(diff, both, catch_exceptions=False)
    done = CliRunner().invoke(diff, [*both, "--head-dim", "16", "--json"])
    assert json.loads(done.output)["differ"] is True


def test_files_of_one_name_are_two(tmp_path):
    """Whichever Python has read first."""
    text = "from phasor import Rope\nfrom phasor.numpy import rotate\n"
    text += "rope = Rope(head_dim=16, pairing='half', base={}.0)\n"
    text += "def turned(x, positions):\n    return rotate(x, positions, rope)\n"
    for base in (500, 700):
        (tmp_path / f"{base}").mkdir()
        (tmp_path / f"{base}/model.py").write_text(text.format(base), "utf-8")
    both = [f"{tmp_path}/{base}/model.py:turned" for base in (500, 700)]
    done = CliRunner().invoke(diff, [*both, "--head-dim", "16"])
    assert "The second: Base: 700 instead of 500." in done.output
    assert find_function(both[0]) is find_function(both[0])


def test_diff_calls_a_function_with_a_table(tmp_path, config):
    """As identify does; models take none."""
    text = "import numpy as np\ndef cos_sin(p):\n"
    text += "    angles = np.tile(p[..., None] * 500.0 ** (-np.arange(8) / 8), 2)\n"
    text += "    return np.cos(angles)[..., None, :], np.sin(angles)[..., None, :]\n"
    text += "def turned(q, k, cos, sin):\n"
    text += "    return [x * cos + np.concatenate([-x[..., 8:], x[..., :8]], -1) * sin"
    text += " for x in (q, k)]\n"
    (tmp_path / "tables.py").write_text(text, "utf-8")
    done = CliRunner().invoke(diff, [config, "tables.py:turned", "--table", "tables.py:cos_sin"])
    assert (done.exit_code, "They agree" in done.output) == (0, True)
    done = CliRunner().invoke(diff, [config, config, "--table", "tables.py:cos_sin"])
    assert (done.exit_code, "--table is for functions" in done.output) == (2, True)


def test_diff_as_json_of_a_refused_position_has_the_reason_and_no_infinity():
    """JSON has no such number."""
    both = ["somebodys_rope:turned", "somebodys_rope:short"]
    done = CliRunner().invoke(diff, [*both, "--head-dim", "16", "--json"])

    def refuse(constant):
        raise ValueError(constant)

    plain = json.loads(done.output, parse_constant=refuse)
    assert (plain["differ"], plain["difference"]["size"], plain["difference"]["score"]) == (
        True, None, None,
    )  # fmt: skip
    assert "IndexError" in plain["difference"]["refused"]


def test_diff_refuses_a_width_that_is_not_the_models(config):
    """Rather than take one of them."""
    words = [config, "somebodys_rope:turned", "--head-dim", "32"]
    with pytest.raises(SpecError, match="the model's, 16, got 32"):
        CliRunner().invoke(diff, words, catch_exceptions=False)


def test_diff_of_two_models_refuses_what_is_for_functions(config):
    """Rather than ignore it."""
    done = CliRunner().invoke(diff, [config, config, "--kind", "rope"])
    assert (done.exit_code, "--kind is for functions" in done.output) == (2, True)


def test_a_function_of_a_file_is_found_by_its_path():
    """As of a module, in its folder."""
    assert is_function("some/where/file.py:turned")
    done = CliRunner().invoke(identify, ["somebodys_rope.py:turned", "--head-dim", "16"])
    assert (done.exit_code, "powers of base 500." in done.output) == (0, True)
    with pytest.raises(SpecError, match=r"nothing\.py is not a file"):
        find_function("nothing.py:turned")


def test_what_no_rope_does_has_an_exit_status_of_its_own(tmp_path):
    """After the report."""
    (tmp_path / "still.py").write_text("def still(x, positions):\n    return 1 * x\n", "utf-8")
    done = CliRunner().invoke(identify, ["still.py:still", "--head-dim", "16"])
    assert (done.exit_code, "No Rope does this" in done.output) == (3, True)
