"""What is remembered alone is printed, and is no default."""

from __future__ import annotations

import tomllib

from tools.sources import TABLE, has_source, published_types, remembered, transformers_types


def test_what_is_remembered_is_no_default() -> None:
    """Files of such types have to say their base: without one they are refused."""
    rows = tomllib.loads(TABLE.read_text("utf-8"))["model_types"]
    names = [*remembered()]
    assert "orion" in names
    for name in names:
        row = rows.get(name, {})
        for facts in (row, *row.get("kinds", {}).values()):
            assert not {"base", "fraction", "head_dim"} & facts.keys(), name


def test_what_is_run_or_read_is_not_remembered() -> None:
    """A class of transformers, a published file, a line with a source, and a type like one."""
    assert "llama" in transformers_types()
    assert "stripedhyena" in published_types() - transformers_types()
    known = {"llama", "stripedhyena", "open_lm", "hf_olmo", "joyai_llm_flash", "llada"}
    assert not known & {*remembered()}


def test_a_source_counts_where_it_stands() -> None:
    """Above the line, its table, or all; not above another."""
    text = ["# source: all", "", "[a]", "x = 1"]
    assert has_source(text, 3)
    text = [
        "# of all",
        "",
        "# source: here",
        "[a]",
        "x = 1",
        "[b]",
        "y = 2",
        "# source: z",
        "z = 3",
    ]
    assert [has_source(text, i) for i in (4, 6, 8)] == [True, False, True]
