"""The command line: what it prints, where it prints it, and how it ends."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import click
import pytest

import phasor
import phasor.cli
from phasor.cli import COMMANDS, run
from phasor.cli.output import Screen
from phasor.cli.show import print_model

from .running import run_phasor

EXAMPLE = Path(phasor.__file__).parent / "cli" / "llama-3.1-8b.json"


def test_show_says_what_a_config_means():
    """A config file is described in words, with its law and the pairs that never turn."""
    done = run_phasor("show", EXAMPLE)
    assert done.returncode == 0
    assert "All 128 coordinates of a head turn, in 64 pairs (i, i + 64)." in done.stdout
    # a hand's blend: 1 / (s + (1 - s) / 8) with s a third of the pair's turns in 8192, less one
    groups = "Pairs 0-28 kept; 29-34 divided by 1.20748 to 5.25733; 35-63 divided by 8."
    assert groups in done.stdout
    assert "Pairs 35-63 never complete a turn within 8192 positions before the extension." in (
        done.stdout
    )


def test_show_says_only_what_is_done_to_the_softmax():
    """A factor of 1 is none; DeepSeek's is the square of 0.1 ln 40 + 1."""
    assert "Softmax" not in run_phasor("show", "llama-3.1-8b").stdout
    factor = (0.1 * math.log(40) + 1) ** 2
    assert (
        f"Softmax scale: multiplied by {factor:.6g}\n" in run_phasor("show", "deepseek-v3").stdout
    )


def test_show_selects_rows_unless_all_are_asked_for():
    """Every pair is a row with --pairs; without it a reader gets a selection and is told so."""
    some = run_phasor("show", "llama-3.1-8b").stdout
    every = run_phasor("show", "llama-3.1-8b", "--pairs").stdout

    def rows(text):
        return [int(line.split()[0]) for line in text.splitlines() if line[:8].strip().isdigit()]

    assert rows(every) == list(range(64))
    assert 10 < len(rows(some)) < 25
    assert "--pairs shows all" in some
    assert "--pairs shows all" not in every


def test_show_json_holds_everything_the_table_shows():
    """--json gives the rope, its factors and every pair as numbers."""
    plain = json.loads(run_phasor("show", "gpt-oss-20b", "--json").stdout)
    kinds = list(plain["kinds"].values())
    assert plain["layer_kinds"]
    assert phasor.Rope.from_dict(kinds[0]["rope"]) == phasor.preset("gpt-oss-20b")[0]
    assert kinds[0]["attention_factor"] == pytest.approx(1.34657359027997, abs=1e-14)
    assert kinds[0]["logit_factor"] == pytest.approx(1.34657359027997**2, abs=1e-14)
    assert kinds[0]["softmax_factor"] == plain["softmax_factor"] == 1.0
    assert [row["pair"] for row in kinds[0]["pairs"]] == list(range(32))
    assert kinds[0]["pairs"][0]["wavelength"] == pytest.approx(6.283185307179586, abs=1e-15)


def test_show_json_of_a_stopped_pair_has_no_wavelength():
    """A pair that stands still has no wavelength and no divisor in JSON, where infinity is none."""
    plain = json.loads(run_phasor("show", "gemma-4-31b", "--json").stdout)
    last = plain["kinds"]["full"]["pairs"][-1]
    assert last["inv_freq"] == 0.0
    assert last["wavelength"] is None
    assert last["divided_by"] is None


def test_show_picks_a_rules_law_where_it_is_told():
    """LongRoPE shows its short list at a short length and its long list at a long one."""
    short = run_phasor("show", "phi-3.5-mini", "--seq-len", 4096).stdout
    long = run_phasor("show", "phi-3.5-mini", "--seq-len", 4097).stdout
    assert "shown here for 4096 tokens" in short
    assert "/ 64.84" in long
    assert "/ 64.84" not in short


def test_show_names_layers_without_an_embedding():
    """NoPE layers are listed as what they are."""
    done = run_phasor("show", "smollm3-3b")
    assert "No position embedding." in done.stdout


def test_diff_of_a_model_with_itself_is_silent_agreement():
    """Exit code 0 and a sentence when a config and its preset agree."""
    done = run_phasor("diff", EXAMPLE, "llama-3.1-8b")
    assert done.returncode == 0
    assert "They agree within 1e-06 on every pair of every layer." in done.stdout


def test_diff_names_the_first_pair_and_position():
    """Exit code 1 and the first parting when two models differ."""
    done = run_phasor("diff", "llama-3.1-8b", "llama-3-8b")
    assert done.returncode == 1
    assert "Earliest pair: 29 at position 1" in done.stdout
    assert "35 pairs differ within the context." in done.stdout


def test_a_factor_on_cos_and_sin_and_one_on_the_softmax_are_told_apart():
    """The same square on the logits, by either way."""
    law = phasor.scaling.Yarn(factor=40.0, original_max_positions=4096)
    one, other = (
        phasor.LayerRopes(
            name=name,
            layer_kinds=("rope",),
            kinds={"rope": phasor.Rope(head_dim=64, pairing="half", scaling=scaling)},
        )
        for name, scaling in (("cos", law), ("softmax", replace(law, mscale_all_dim=1.0)))
    )
    said = str(phasor.diff(one, other, context=64))
    assert "Softmax scale: times 1 and 1.87385421." in said
    assert "Attention factor: 1.36888795 and 1." in said
    assert "Softmax factor: 1 and 1.87385421." in said
    assert "Logit factor" not in said


def test_diff_as_json_carries_the_verdict():
    """Machines read the same difference as people."""
    done = run_phasor("diff", "llama-2-7b", "llama-2-7b-meta", "--json")
    plain = json.loads(done.stdout)
    assert done.returncode == 1
    assert plain["differ"] is True
    assert plain["layers"][0]["difference"]["fields"]["pairing"] == ["half", "interleaved"]


def test_diff_tolerance_decides():
    """What parts by less than the tolerance agrees."""
    done = run_phasor("diff", "llama-3.1-8b", "llama-3-8b", "--context", 2, "--tolerance", 0.01)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "lama-3.1-8b"], "did you mean 'llama-3.1-8b'"),
        (["show", "nosuch"], "got 'nosuch'; `phasor presets` lists them all\n"),
        (["show", "missing/config.json"], "missing/config.json"),
        (["show"], "Missing argument 'MODEL'"),
        (["show", "llama-3-8b", "--seq-len", "0"], "--seq-len"),
        (["diff", "llama-3-8b"], "Missing argument 'SECOND'"),
        (["diff", "llama-3-8b", "llama-3-8b", "--tolerance", "0"], "--tolerance"),
        (["shw"], "No such command 'shw'"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(arguments, said):
    """Nothing on stdout, one line on stderr, exit code 2, no traceback."""
    done = run_phasor(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("phasor: ")
    assert said in done.stderr


def test_a_broken_config_is_refused_by_key(tmp_path):
    """A config that makes no sense names the key and leaves no traceback."""
    path = tmp_path / "config.json"
    path.write_text(EXAMPLE.read_text().replace('"factor": 8.0', '"factor": -8.0'))
    done = run_phasor("show", path)
    assert done.returncode == 2
    assert "factor" in done.stderr
    assert "-8" in done.stderr


NAMES = [
    "[link=https://x.test]a[/]",
    "tiny [/INST] model",
    "Mistral [v0.3] 7B",
    "a\\",
    "one :smile: two",
    "[bold]",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("command", ["show", "diff"])
def test_a_models_name_is_only_ever_text(tmp_path, name, command):
    """Brackets and colons in it are letters."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(EXAMPLE.read_text()) | {"_name_or_path": name}))
    done = run_phasor(command, path, *([EXAMPLE] if command == "diff" else []))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{name}: " if command == "show" else f"{name} and ")


@pytest.mark.parametrize("kind", ["[/x]", "[a] layers"])
def test_a_kind_of_layer_is_only_ever_text(kind, capsys):
    """Whoever made the ropes named it."""
    rope = phasor.Rope(head_dim=8, pairing="half")
    first, second = (
        phasor.LayerRopes(name="m", layer_kinds=(kind,), kinds={kind: one})
        for one in (rope, replace(rope, base=5.0))
    )
    print_model(first, None, None, every_pair=False)
    Screen().print_lines(phasor.diff(first, second, context=16).lines())
    assert capsys.readouterr().out.count(f"\n{kind} (layers 0)") == 2


# a shell, as a process with threads should not run Python between fork and exec
LIMITED = ("sh", "-c", 'ulimit -f 0; exec "$@"', "sh")


def limited(*arguments, folder):
    """The command where nothing can be written to a file, its output to one."""
    with (folder / "out").open("wb") as out:
        return subprocess.run(
            [*LIMITED, sys.executable, "-m", "phasor", *arguments],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )


@pytest.mark.parametrize(
    "arguments",
    [["show", "llama-3.1-8b"], ["show", "llama-3.1-8b", "--json"], ["presets"]],
    ids=" ".join,
)
@pytest.mark.processes
def test_an_output_that_cannot_be_written_is_one_line_and_exit_code_2(tmp_path, arguments):
    """A full disk is not a difference between models."""
    done = limited(*arguments, folder=tmp_path)
    assert done.stderr == "phasor: File too large\n"
    assert done.returncode == 2


def test_no_colours_go_into_a_pipe():
    """What is not a terminal gets plain text."""
    assert "\x1b" not in run_phasor("show", "llama-3.1-8b").stdout


@pytest.mark.parametrize(
    "arguments",
    [[], ["--help"], ["show", "--help"], ["presets"], ["show", "llama-3.1-8b"],
     ["show", "llama-3.1-8b", "--json", "--context", "4096"], ["diff", "llama-3-8b", "gpt-j-6b"]],
    ids=" ".join,
)  # fmt: skip
@pytest.mark.processes
def test_a_closed_pipe_ends_it_without_a_word(arguments):
    """`phasor presets | head -1`: neither a difference nor a refusal, and status 141."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "phasor", *arguments],
        stdout=write,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("package", ["click", "numpy", "rich"])
def test_an_interrupt_while_packages_are_imported_prints_nothing(
    package: str, tmp_path: Path
) -> None:
    """The first half second of every command."""
    (tmp_path / f"{package}.py").write_text("raise KeyboardInterrupt\n")
    source = Path(phasor.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "phasor", "presets"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, source)))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_ends_it_with_130(monkeypatch, capsys):
    """In the middle of work; nothing is printed but the end of the terminal's line."""

    def interrupted(model, **reading):
        raise KeyboardInterrupt

    monkeypatch.setattr("phasor.cli.show.read_model", interrupted)
    monkeypatch.setattr(sys, "argv", ["phasor", "show", "llama-3-8b"])
    with pytest.raises(SystemExit) as leaving:
        run()
    assert leaving.value.code == 130
    assert capsys.readouterr() == ("", "\n")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("model", "status"), [("llama-3.1-8b", 0), ("nosuch", 2), ("-", 2)])
@pytest.mark.processes
def test_streams_that_are_closed_are_no_trouble(closed, model, status):
    """What is said to them is lost, and the exit status is what it was."""
    stdin = "" if "<" in closed else "</dev/null"
    command = f"'{sys.executable}' -m phasor show {model} {stdin} {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=False)
    assert done.returncode == status
    assert b"Traceback" not in done.stderr


def test_every_command_can_be_typed():
    """Those that the files define are those that are listed."""
    files = [import_module(f"phasor.cli.{one.name}") for one in iter_modules(phasor.cli.__path__)]
    defined = {
        (value.name, file.__name__)
        for file in files
        for value in vars(file).values()
        if isinstance(value, click.Command) and value.callback.__module__ == file.__name__
    }
    assert defined == {(name, f"phasor.cli.{name}") for name in COMMANDS}


def test_phasor_alone_prints_its_help():
    """A command a line, and exit status 0."""
    done = run_phasor()
    assert (done.returncode, done.stderr) == (0, "")
    listed = done.stdout.split("Commands:\n")[1].split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in listed] == list(COMMANDS)
    assert done.stdout == run_phasor("--help").stdout


@pytest.mark.parametrize(
    "arguments", [["show", "-"], ["diff", "-", "llama-3.1-8b"], ["extend", "-", "--to", "262144"]]
)
def test_a_dash_is_standard_input(arguments):
    """What is piped in is read as the file would be."""
    file = EXAMPLE.read_bytes()
    piped = run_phasor(*arguments, stdin=file)
    read = run_phasor(*(EXAMPLE if word == "-" else word for word in arguments))
    assert piped.returncode == read.returncode == 0
    assert piped.stdout == read.stdout


def test_a_shell_completes_commands_presets_and_files():
    """With click's own protocol, which the documentation switches on."""

    def offered(*words):
        typed = {"COMP_WORDS": " ".join(("phasor", *words)), "COMP_CWORD": str(len(words))}
        return run_phasor(_PHASOR_COMPLETE="bash_complete", **typed).stdout.split()

    assert offered("sh") == ["plain,show"]
    llamas = [name for name in phasor.preset_names() if name.startswith("llama-3.1")]
    assert offered("show", "llama-3.1") == [f"plain,{name}" for name in llamas]
    assert offered("diff", "llama-3-8b", "configs/") == ["file,configs/"]


def test_colours_are_the_only_thing_that_a_terminal_obeys(tmp_path):
    """No link, no other colour and no other title, where a name asks for them."""
    name = "[link=https://x.test]a[/link]\x1b]8;;https://x.test\x1b\\\x1b[35m:smile:"
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(EXAMPLE.read_text()) | {"_name_or_path": name}))
    for command in (["show", path], ["diff", path, EXAMPLE], ["extend", path, "--to", "262144"]):
        shown = run_phasor(*command, FORCE_COLOR="1", TERM="xterm").stdout
        colours = set(re.findall("\x1b[^m]*m", shown))
        assert colours
        assert "\x1b[35m" not in colours
        assert "\x1b" not in re.sub(r"\x1b\[[0-9;]*m", "", shown)
        assert (
            "[link=https://x.test]a[/link]\\x1b]8;;https://x.test\\x1b\\\\x1b[35m:smile:" in shown
        )


HEAVY = (
    "torch",
    "altair",
    "phasor.files.configs",
    "phasor.identification",
    "phasor.files.checkpoint",
)


@pytest.mark.processes
def test_importing_phasor_imports_little_else():
    """Neither what reads files and functions, nor the terminal."""
    program = f"import sys, phasor; print({{*{(*HEAVY, 'rich', 'click')}}} & {{*sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


@pytest.mark.processes
def test_showing_a_preset_imports_what_it_needs():
    """No torch, and no other command's packages."""
    program = (
        "import sys, phasor.cli as cli\n"
        "sys.argv = ['phasor', 'show', 'llama-3.1-8b']\n"
        "try:\n    cli.run()\nexcept SystemExit:\n    pass\n"
        f"print(sorted({{*{HEAVY}}} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_every_preset_can_be_listed():
    """`phasor presets` prints what `phasor show` takes, and a line of facts beside it."""
    lines = run_phasor("presets").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(phasor.preset_names())
    assert json.loads(run_phasor("presets", "--json").stdout) == list(phasor.preset_names())


def test_presets_are_found_by_words_of_their_names():
    """All words, in any capitals; if there is none, the way to all of them."""
    (line,) = run_phasor("presets", "LLAMA", "3.3").stdout.splitlines()
    facts = "half pairs, 128 coordinates, base 500000, Llama3 (factor 8), 131072 tokens"
    assert line.split() == ["llama-3.3-70b", *facts.split()]
    none = run_phasor("presets", "nosuch")
    assert none.returncode == 2
    assert "no preset has nosuch in its name" in none.stderr


def test_version_is_printed():
    """--version prints the installed version."""
    assert "0.1.0" in run_phasor("--version").stdout
