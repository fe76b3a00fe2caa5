"""The models that are there to be copied: short, and right."""

from __future__ import annotations

import runpy
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("gpt", "vit", "video")


def example(name: str) -> dict[str, Any]:
    """What a file of the examples defines."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def printed(
    name: str, *arguments: str, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch
) -> list[str]:
    """The lines that an example prints."""
    patch.setattr(sys, "argv", [f"{name}.py", *arguments])
    example(name)["main"]()
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_under_150_lines(name: str) -> None:
    """So that it is read before it is copied."""
    assert len((EXAMPLES / f"{name}.py").read_text("utf-8").splitlines()) < 150


@pytest.mark.parametrize("options", [(), ("--compile",)], ids=["eager", "compiled"])
def test_the_gpt_learns_its_documents(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled and not, from the same loss on; then it writes."""
    once, lines = (
        printed("gpt", "--steps", *given, capsys=capsys, patch=monkeypatch)
        for given in (("1",), ("60", *options))
    )
    losses = [float(line.split()[-1]) for line in lines[:3]]
    assert losses[0] > 5
    assert losses[-1] < 2.5
    assert any(line.startswith("class ") for line in lines)
    assert lines[0] == once[0]


def test_a_cached_token_has_the_logits_of_the_whole_text() -> None:
    """Whatever it was read with: the prompt in one call, or a token at a time."""
    of = example("gpt")
    model = of["GPT"]()
    tokens = torch.randint(256, (1, 20))
    causal = torch.ones(20, 20, dtype=torch.bool).tril()
    whole = model(tokens, torch.arange(20), causal)
    cache: dict[int, tuple[Tensor, Tensor]] = {}
    parts: list[Tensor] = []
    for start, stop in ((0, 7), *((i, i + 1) for i in range(7, 20))):
        mask = causal[start:stop, :stop]
        parts.append(model(tokens[:, start:stop], torch.arange(start, stop), mask, cache))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-5)


def test_no_packed_document_sees_another() -> None:
    """Each has the logits that it has alone."""
    of = example("gpt")
    model = of["GPT"]()
    text = b"\n\n".join(bytes([65 + i]) * (30 + i) for i in range(20))
    tokens, positions, mask = next(of["packed_rows"](text, torch.Generator().manual_seed(0)))
    packed = model(tokens, positions, mask)
    starts = [*(positions[0] == 0).nonzero().flatten().tolist(), tokens.shape[1]]
    assert len(starts) > 5
    for start, stop in pairwise(starts):
        length = stop - start
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        alone = model(tokens[:1, start:stop], torch.arange(length), causal)
        torch.testing.assert_close(packed[:1, start:stop], alone, rtol=0, atol=1e-5)


def test_the_vit_reads_a_resolution_that_it_was_not_trained_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guessing is right one time in four."""
    lines = printed("vit", capsys=capsys, patch=monkeypatch)
    for line in lines[-2:]:
        assert int(line.split()[-2].rstrip("%")) > 75


def test_a_block_of_video_sees_differences_of_places_alone() -> None:
    """A clip that begins later, or lies elsewhere in a larger one, comes out alike."""
    of = example("video")
    block, rotation = of["VideoBlock"](), of["Rotation"]
    positions = of["clip_positions"](3, 2, 4, speed=0.5)
    clip, step = torch.randn(1, 24, 256), torch.randn(1, 256)
    here = block(clip, rotation.at(positions, of["ROPE"]), step)
    there = block(clip, rotation.at(positions + torch.tensor([100.0, 7.0, 50.0]), of["ROPE"]), step)
    torch.testing.assert_close(there, here, rtol=0, atol=1e-4)
    assert not torch.allclose(block(clip, rotation.at(positions * 2, of["ROPE"]), step), here)


def test_clips_of_any_size_go_through_one_block(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no other setting than their positions."""
    lines = printed("video", capsys=capsys, patch=monkeypatch)
    assert [line.split(": ")[1] for line in lines] == [f"[1, {n}, 256]" for n in (192, 384, 768)]
