"""The rotations of a forward pass: layers that share their positions.

Each contender does what a model that uses it does: what is common to the layers is made once in a
pass, and is timed; tables that a model makes when it is built are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from cases import Case
from contenders import everyone
from measure import UnableError, tolerance, worst_error
from report import Section
from timing import Times, interleave
from torch import Tensor

from phasor.pairings import Pairing
from phasor.torch import Rotation, rotate_qk
from phasor.torch._operator import eager

LAYERS = 32
LENGTHS = (1, 64, 512, 4096)
QUICK = ("1, *",)
#: Fewest and most rounds.
ROUNDS = 5, 100
#: Passes of at most so many tokens find their tensors in the cache, as 31 of 32 layers do.
WARM = 512
SHARED, EACH = "`Rotation`", "`rotate_qk` in each layer"
PLAIN = "plain torch, `Rotation`"
TRANSFORMERS = "transformers"
#: Their tables are made when a model is built.
WITH_TABLES = "Meta, complex", "torchtune", "rotary-embedding-torch"
#: What a time over another's is to be at most; `SHARED` over each contender's 1.
MOST_OF_ONE_CALL, MOST = 1.05, 1.0
_NOTE = f"""\
{LAYERS} layers of 32 + 8 heads of 128, whose query and key are rotated at the same positions; with
backward each layer's gradients too. Milliseconds of `rotate_qk` called in each layer, and the time
of a `Rotation` made once divided by the others': below 1 it is faster. The last column is phasor
without its kernel (`backend="eager"`, cos and sin by plain operations as well) over transformers'
own module and function. Of torchtune, Meta's form and rotary-embedding-torch the tables are made
beforehand."""
_VERDICT = f"""\
Of {{3}} cases, each of one length and dtype, with or without backward, a `Rotation` takes at most
{MOST_OF_ONE_CALL} of `rotate_qk` in each layer in {{0}}, and no longer than any contender in {{1}};
without the kernel it takes no longer than transformers in {{2}}."""

#: From a query and a key to both turned.
Turn = Callable[[Tensor, Tensor], Sequence[Tensor]]


class Way:
    """How a contender starts a pass, and the layout of what its turns take."""

    def __init__(
        self, start: Callable[[], Turn], pairing: Pairing = "half", *, heads_first: bool = False
    ) -> None:
        self.start, self.pairing, self.heads_first = start, pairing, heads_first


def ours(case: Case, positions: Tensor) -> dict[str, Way]:
    """Phasor's ways."""
    rope = case.rope("half")

    def plain() -> Turn:
        rows = eager.cos_sin(positions, rope.to_json(), 1.0, torch.float32)
        return partial(Rotation.of_rope(*rows, rope), backend="eager")

    return {
        SHARED: Way(lambda: Rotation.at(positions, rope)),
        EACH: Way(lambda: lambda q, k: rotate_qk(q, k, positions, rope)),
        PLAIN: Way(plain),
    }


def transformers_ways(case: Case, positions: Tensor) -> dict[str, Way]:
    """Llama's module and function, as they are and compiled."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    parameters = {"rope_type": "default", "rope_theta": case.base}
    embedding = LlamaRotaryEmbedding(
        LlamaConfig(head_dim=case.head_dim, rope_parameters=parameters)
    )
    hidden = torch.empty(0, dtype=getattr(torch, case.dtype))
    ids = positions.view(1, case.seq)

    def way(make: Any, turn: Any) -> Way:
        def start() -> Turn:
            cos, sin = make(hidden, ids)
            return lambda q, k: turn(q, k, cos, sin)

        return Way(start, heads_first=True)

    compiled = (torch.compile(part, dynamic=False) for part in (embedding, apply_rotary_pos_emb))
    return {
        TRANSFORMERS: way(embedding, apply_rotary_pos_emb),
        f"{TRANSFORMERS}, compiled": way(*compiled),
    }


def table_ways(case: Case, positions: Tensor) -> dict[str, Way]:
    """Those that keep tables from pass to pass, as the page of rotations has them."""
    ways: dict[str, Way] = {}
    for contender in everyone(case, "cpu"):
        if contender.name in WITH_TABLES:
            with suppress(ImportError, UnableError):
                turn = contender.build(case, case.rope(contender.pairing), positions)
                ways[contender.name] = Way(
                    lambda turn=turn: turn, contender.pairing, heads_first=contender.heads_first
                )
    return ways


def make_pass(case: Case, way: Way) -> Callable[[], Sequence[Tensor]]:
    """One pass through all layers, which returns what the last made."""
    inputs = (*case.tensors(), *case.tensors(1))
    q, k, dq, dk = (x.transpose(1, 2) if way.heads_first else x for x in inputs)
    leaves = [x.detach().requires_grad_(case.backward) for x in (q, k)]

    def run() -> Sequence[Tensor]:
        turn, outputs = way.start(), ()
        for _ in range(LAYERS):
            outputs = tuple(turn(*leaves))
            if case.backward:
                outputs += torch.autograd.grad(outputs, leaves, (dq, dk))
        return outputs

    return run


def time_pass(case: Case, seconds: float) -> dict[str, Any]:
    """Times of those whose results are right, and the errors of all."""
    positions = case.positions().flatten()
    ways = ours(case, positions) | table_ways(case, positions)
    with suppress(ImportError):
        ways |= transformers_ways(case, positions)
    calls: dict[str, Callable[[], object]] = {}
    errors: dict[str, float] = {}
    inputs = (*case.tensors(), *case.tensors(1))
    for name, way in ways.items():
        call = make_pass(case, way)
        results = [x.transpose(1, 2) if way.heads_first else x for x in call()]
        rope = case.rope(way.pairing)
        errors[name] = worst_error(case, rope, case.positions(), inputs, results)
        if errors[name] <= tolerance(case):
            calls[name] = call
    rounds = interleave(calls, seconds=2 * seconds, warm=case.seq <= WARM, rounds=ROUNDS)
    return {"seconds": rounds, "errors": errors}


def steps(device: Any, seconds: float) -> dict[str, Callable[[], Any]]:
    """Every length and dtype, forward alone and with backward."""
    calls: dict[str, Callable[[], Any]] = {}
    for seq in LENGTHS:
        for backward in (False, True):
            for dtype in ("bfloat16", "float32"):
                work = "forward and backward" if backward else "forward"
                case = Case(name=f"{seq}, {work}", dtype=dtype, seq=seq, backward=backward)
                calls[case.label] = partial(time_pass, case, seconds)
    return calls


def sections(results: Mapping[str, Any], device: str) -> Iterator[Section]:
    """What is held in how many cases, and the ratios of all."""
    rows: dict[str, dict[str, str]] = {}
    counts = [0, 0, 0]
    for name, plain in results.items():
        times = Times(plain["seconds"])
        row = rows[name] = {"`rotate_qk`, ms": f"{1e3 * times.median(EACH):.4g}"}
        ratios = {rival: times.ratio(SHARED, rival) for rival in times if rival != SHARED}
        rivals = [ratio.median for rival, ratio in ratios.items() if rival not in (EACH, PLAIN)]
        row |= {rival: str(ratio) for rival, ratio in ratios.items() if rival != PLAIN}
        row |= {label: "*wrong*" for label in plain["errors"] if label not in times}
        counts[0] += ratios[EACH].median <= MOST_OF_ONE_CALL
        counts[1] += all(ratio <= MOST for ratio in rivals)
        if TRANSFORMERS in times:
            plain_ratio = times.ratio(PLAIN, TRANSFORMERS)
            row["without the kernel / transformers"] = str(plain_ratio)
            counts[2] += plain_ratio.median <= MOST
    yield Section("", _VERDICT.format(*counts, len(rows)), rows, _NOTE, "tokens, work, dtype")
