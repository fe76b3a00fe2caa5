"""What a longer context costs, as `phasor extend` prints it."""

import json

import pytest

from .running import run_phasor

# keys and values of 36 layers with 8 key heads of 128, in bfloat16
OF_A_TOKEN = 36 * 8 * (128 + 128) * 2


def test_the_memory_is_printed_before_and_after():
    """With the formula in words under it."""
    shown = run_phasor("extend", "qwen3-8b", "--to", "128k").stdout
    before, after = (OF_A_TOKEN * tokens / 2**30 for tokens in (40_960, 131_072))
    sizes = f"{before:g} GiB at 40960 tokens, {after:g} GiB at 131072.\n"
    assert (
        f"sequence: {sizes}  2 bytes x 36 rope layers x tokens x 8 key heads x (128 + 128)" in shown
    )


def test_the_memory_is_in_the_json():
    """In bytes, with the same formula."""
    plain = json.loads(run_phasor("extend", "qwen3-8b", "--to", "128k", "--json").stdout)
    assert plain["cache"]["bytes"] == {"before": OF_A_TOKEN * 40_960, "after": OF_A_TOKEN * 131_072}
    assert plain["cache"]["formula"].startswith("2 bytes x 36 rope layers")


@pytest.mark.parametrize("arguments", [["gemma-3-4b", "--kind", "full"], ["deepseek-v3"]], ids=str)
def test_a_memory_that_is_not_known_is_said(arguments):
    """With the way out, and null in JSON."""
    model = ["extend", *arguments, "--to", "1M"]
    shown = run_phasor(*model).stdout
    assert "Keys and values of a sequence: not counted, because " in shown
    assert "give the path of a config.json.\n" in shown
    assert json.loads(run_phasor(*model, "--json").stdout)["cache"]["bytes"] is None


def test_a_file_with_a_key_that_stands_twice_is_not_written_anew(tmp_path):
    """Which of both values holds is the user's to say; nothing is written."""
    sizes = "hidden_size: 512\nnum_attention_heads: 4\nnum_hidden_layers: 2\n"
    text = f"model_type: llama\n{sizes}max_position_embeddings: 4096\nrope_theta: 1e4\n"
    file, folder = tmp_path / "config.yaml", tmp_path / "longer"
    file.write_text(text + "init_std: 0.1\ninit_std: 0.2\n")
    arguments = ["extend", str(file), "--to", "16384", "--law", "yarn", "--write", str(folder)]
    done = run_phasor(*arguments)
    assert done.returncode != 0
    assert "0.1 and 0.2, because it appears twice (keep one)" in done.stderr
    assert not folder.exists()
    file.write_text(text + "init_std: 0.1\n")
    run_phasor(*arguments)
    assert json.loads((folder / "config.json").read_text())["init_std"] == 0.1


@pytest.mark.parametrize("columns", [20, 40, 60, 70])
def test_a_narrow_terminal_cuts_no_name_and_no_number(columns: int) -> None:
    """Each law is a few lines where the table is too wide."""
    wide = run_phasor("extend", "qwen3-8b", "--to", "128k", COLUMNS="100").stdout
    narrow = run_phasor("extend", "qwen3-8b", "--to", "128k", COLUMNS=str(columns)).stdout
    _, _, rows = wide.partition("────\n")
    for row in rows.partition("\n\n")[0].splitlines():
        assert all(word in narrow.split() for word in row.split())
    assert "…" not in narrow
