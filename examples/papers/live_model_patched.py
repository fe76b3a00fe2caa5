"""The trained model with phasor's rotation: the same text, and nearer to exact in 16 bits."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from phasor.torch.live import patch, unpatch

from .live_model_reading import TEXTS, Reader
from .pictures import contest, table
from .study import Row, Study

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time there was a",
    "A rotary position embedding turns",
    "The three laws of thermodynamics are",
)
MODELS = ("transformers", "transformers, frequencies rounded too", "patched")
LAST = 64  # tokens of each window whose logits are compared


def run(study: Study, reader: Reader) -> None:
    """Greedy text of every prompt, then the logits of every text."""
    for prompt in PROMPTS:
        study.measure(f"greedy/{prompt}", lambda p=prompt: _compare_text(study.settings, reader, p))
    for mark in study.settings["marks"]:
        for seed in _texts(study, mark):
            study.measure(
                f"logits/{mark}/seed {seed}", lambda m=mark, s=seed: _errors(reader, m, s)
            )


def _texts(study: Study, mark: int) -> range:
    """Numbers of the texts whose logits are compared at a length: all where that takes seconds.

    Elsewhere two more than there are seeds: which model is nearest on three texts was chance.
    """
    if mark == study.settings["marks"][0]:
        return range(len(TEXTS))
    return range(study.seeds.start, study.seeds.stop + 2)


def _compare_text(made: Row, reader: Reader, prompt: str) -> Row:
    """Where the patched model's text parts from the plain one's, and by how little it had to."""
    start = torch.tensor(reader.encode(prompt))
    (plain, plain_scores), (patched, patched_scores) = (
        _greedy(reader.model, start, made["written"], patched) for patched in (False, True)
    )
    different = (plain != patched).nonzero()
    # while the tokens agree the scores are of one text; those where they part are too
    common = int(different[0]) if len(different) else len(plain) - 1
    changes = (plain_scores - patched_scores)[: common + 1].abs().amax(-1)
    best = plain_scores[common].topk(2).values
    return {
        "same": common if len(different) else len(plain),
        "gap": (best[0] - best[1]).item() if len(different) else None,
        "change there": changes[-1].item(),
        "largest change": changes.max().item(),
    }


@torch.no_grad()
def _greedy(model: Any, start: Tensor, count: int, patched: bool) -> tuple[Tensor, Tensor]:
    """The most likely token ``count`` times over, and the logits ``[count, vocabulary]``."""
    from transformers import DynamicCache

    if patched:
        patch(model)
    cache, part, scores = DynamicCache(), start, list[Tensor]()
    for _ in range(count):
        scores.append(model(part[None], None, None, cache, use_cache=True).logits[0, -1])
        part = scores[-1].argmax(-1, keepdim=True)
    if patched:
        unpatch(model)
    found = torch.stack(scores)
    return found.argmax(-1), found


def _errors(reader: Reader, length: int, seed: int) -> Row:
    """Of each model in bfloat16, root mean square of its last logits' distance from float64's."""
    tokens = reader.window(seed, length)
    exact = deepcopy(reader.model).double()
    patch(exact)
    wanted = _last(exact, tokens)
    del exact
    found: Row = {}
    for name in MODELS:
        model = deepcopy(reader.model).bfloat16()
        if name == MODELS[0]:  # as it is loaded in bfloat16: the frequencies stay in float32
            ours, theirs = (one.get_decoder().rotary_emb for one in (model, reader.model))
            ours.inv_freq = theirs.inv_freq.clone()
        elif name == MODELS[2]:
            patch(model)
        found[name] = (_last(model, tokens).double() - wanted).square().mean().sqrt().item()
    return found


@torch.no_grad()
def _last(model: Any, tokens: Tensor) -> Tensor:
    """Logits ``[LAST, vocabulary]`` of the last tokens."""
    return model(tokens[None], use_cache=False, logits_to_keep=LAST).logits[0]


def tables(study: Study) -> str:
    """How long the texts are the same, and how far the logits are from exact."""
    rows = []
    for prompt in PROMPTS:
        one = study.measured[f"greedy/{prompt}"]
        gap = "" if one["gap"] is None else f"{one['gap']:.1e}"
        said = f"`{prompt.strip()}`"
        rows.append(
            [said, one["same"], gap, f"{one['change there']:.1e}", f"{one['largest change']:.1e}"]
        )
    count = study.settings["written"]
    header = [f"tokens alike of {count}", "gap of the two best where they part"]
    texts = table(["prompt", *header, "change by patching there", "largest change"], rows)
    header = ["distance of logits from float64"]
    errors: dict[str, tuple[list[object], list[list[float]]]] = {n: ([], []) for n in MODELS}
    for mark in study.settings["marks"]:
        keys = [f"logits/{mark}/seed {seed}" for seed in _texts(study, mark)]
        if all(key in study.measured for key in keys):
            header.append(f"{mark} tokens, {len(keys)} texts")
            for name, (_, columns) in errors.items():
                columns.append([study.measured[key][name] for key in keys])
    return f"{texts}\n\n{contest(header, errors, 4)}" if header[1:] else texts
