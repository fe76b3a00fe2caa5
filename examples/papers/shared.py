"""What the experiments share: text, a small transformer, the training loop, results, pictures."""

from __future__ import annotations

import json
import math
import platform
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import torch
import torch.nn.functional as nnf
from rich.progress import track
from torch import Tensor, nn

from phasor import Rope
from phasor.torch import rotate_qk

SEARCH_SEED = 1000  # learning rates are chosen on it, and nothing is reported of it
Row = dict[str, Any]


# --- text ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Text:
    """The bytes of Python's own standard library, every eighth file held out."""

    train: np.ndarray
    held_out: np.ndarray

    @classmethod
    def load(cls) -> Text:
        """The modules that stand directly in the folder of the standard library."""
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        content = [np.frombuffer(file.read_bytes(), np.uint8) for file in files]
        train = [text for i, text in enumerate(content) if i % 8]
        return cls(np.concatenate(train), np.concatenate(content[::8]))

    def batch(self, seed: Sequence[int], rows: int, length: int) -> Tensor:
        """Training bytes ``[rows, length]``, drawn by the seed alone."""
        return _windows(self.train, np.random.default_rng(seed), rows, length)

    def test(self, rows: int, length: int) -> Tensor:
        """Held-out bytes ``[rows, length]``, the same whoever asks."""
        return _windows(self.held_out, np.random.default_rng(0), rows, length)


def _windows(text: np.ndarray, draw: np.random.Generator, rows: int, length: int) -> Tensor:
    starts = draw.integers(len(text) - length, size=rows)
    return torch.from_numpy(np.stack([text[s : s + length] for s in starts]).astype(np.int64))


# --- model -----------------------------------------------------------------------------------


class Attention(nn.Module):
    """Softmax attention with a rope, with a bias on the scores (ALiBi), or with neither.

    Args:
        width: Of the tokens.
        heads: How many.
        head_dim: Coordinates of each; ``width // heads`` unless given.
        rope: Rotates queries and keys.
        bias: Called with the number of tokens for what is added to the scores,
            ``[heads, seq, seq]``.
        causal: Whether a token sees nothing after itself.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int | None = None,
        rope: Rope | None = None,
        bias: Callable[[int], Tensor] | None = None,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.rope, self.bias, self.causal = heads, rope, bias, causal
        inner = width if head_dim is None else heads * head_dim
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(width, inner, bias=False) for _ in range(3)
        )
        self.o_proj = nn.Linear(inner, width, bias=False)

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both ``[batch, seq, heads, head_dim]``, rotated where there is a rope."""
        # [batch, seq, width] -> [batch, seq, heads, head_dim]
        q, k = (
            project(x).unflatten(-1, (self.heads, -1)) for project in (self.q_proj, self.k_proj)
        )
        if self.rope is None:
            return q, k
        positions, gain = torch.arange(x.shape[1]), self.rope.attention_factor
        return rotate_qk(q, k, positions, self.rope, gain=gain)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.queries_and_keys(x)
        v = self.v_proj(x).unflatten(-1, (self.heads, -1))
        # [batch, seq, heads, head_dim] -> [batch, heads, seq, head_dim]
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        bias = None if self.bias is None else self.bias(x.shape[1])
        out = nnf.scaled_dot_product_attention(q, k, v, bias, is_causal=self.causal)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    @torch.no_grad()
    def weights(self, x: Tensor) -> Tensor:
        """The attention weights ``[batch, heads, seq, seq]``."""
        q, k = (part.transpose(1, 2) for part in self.queries_and_keys(x))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if self.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        return scores.softmax(-1)


class Block(nn.Module):
    """Attention, then a feed-forward layer, each on normed input and added to it."""

    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.attention_norm, self.feed_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed(self.feed_norm(x))


class Transformer(nn.Module):
    """Tokens ``[batch, seq]`` to logits ``[batch, seq, vocabulary]``.

    Args:
        vocabulary: Number of tokens there are.
        width: Of the embeddings.
        layers: How many.
        attention: Makes the attention of one layer.
        absolute: Maps the number of tokens to vectors ``[seq, width]`` that are added to the
            embeddings; None for none.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        layers: int,
        attention: Callable[[], nn.Module],
        absolute: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.absolute = absolute
        self.blocks = nn.ModuleList(Block(width, attention()) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.logits = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.logits.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.absolute is not None:
            x = x + self.absolute(tokens.shape[1])
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


def rotary(made: Row, vocabulary: int, rope: Rope) -> Transformer:
    """A causal transformer of the sizes in ``made`` that rotates with this rope in all layers."""
    width, heads = made["width"], made["heads"]
    layer = partial(Attention, width, heads, head_dim=rope.head_dim, rope=rope)
    return Transformer(vocabulary, width, made["layers"], layer)


def attention_inputs(model: Transformer, tokens: Tensor) -> list[tuple[Attention, Tensor]]:
    """Every layer's attention with the normed tokens ``[batch, seq, width]`` that go into it."""
    found: list[tuple[Attention, Tensor]] = []
    hooks = [
        block.attention.register_forward_hook(lambda layer, args, _: found.append((layer, args[0])))
        for block in model.blocks
    ]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return found


def doublings(first: int, last: int) -> list[int]:
    """``first``, twice as much, and so on up to ``last``."""
    return [first << n for n in range(40) if first << n <= last]


def next_token_bits(model: nn.Module, rows: Tensor) -> Tensor:
    """Bits needed for each token but the first, ``[batch, seq] -> [batch, seq - 1]``."""
    logits = model(rows[:, :-1])
    return nnf.cross_entropy(logits.mT, rows[:, 1:], reduction="none") / math.log(2)


def bits_by_length(model: nn.Module, rows: Tensor, ends: Sequence[int]) -> list[float]:
    """Mean bits of the tokens up to the first end, from there to the second, and so on."""
    with torch.no_grad():
        bits = torch.cat([next_token_bits(model, row[None]) for row in rows])
    return [bits[:, a:b].mean().item() for a, b in pairwise([0, *ends])]


# --- training --------------------------------------------------------------------------------


def fit(
    model: nn.Module,
    loss: Callable[[int], Tensor],
    *,
    steps: int,
    rate: float,
    label: str,
    watch: Callable[[], float] | None = None,
    every: int = 0,
) -> list[float]:
    """Train with AdamW: a short warm-up, then half a cosine down to a tenth of the rate.

    Args:
        model: Trained in place.
        loss: The loss at a step, counted from 0.
        steps: How many.
        rate: The highest learning rate.
        label: Shown beside the progress bar.
        watch: What is measured without a gradient.
        every: After how many steps; 0 for never.

    Returns:
        What ``watch`` returned, in order.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = max(1, steps // 20)

    def factor(step: int) -> float:
        done = max(0, step - warmup) / max(1, steps - warmup)
        return min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * done))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    watched: list[float] = []
    for step in track(range(steps), description=label):
        optimizer.zero_grad()
        loss(step).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        if watch is not None and every and (step + 1) % every == 0:
            with torch.no_grad():
                watched.append(watch())
    return watched


def train_on_text(made: Row, text: Text, model: nn.Module, key: str, rate: float, seed: int) -> Row:
    """Train on the next byte with the sizes in ``made``; the curve of the held-out bits."""
    test = text.test(64, made["seq"] + 1)

    def loss(step: int) -> Tensor:
        return next_token_bits(
            model, text.batch([seed, step], made["rows"], made["seq"] + 1)
        ).mean()

    def watch() -> float:
        return next_token_bits(model, test).mean().item()

    plan = {"steps": made["steps"], "rate": rate, "label": key, "every": made["every"]}
    curve = fit(model, loss, watch=watch, **plan)
    return {"rate": rate, "curve": curve, "loss": curve[-1]}


def milliseconds(call: Callable[[], object], calls: int) -> float:
    """Processor time of one call: the median, each over enough calls for the clock."""
    times: list[float] = []
    call()
    for _ in range(calls):
        begin, done = time.process_time(), 0
        while done == 0 or time.process_time() - begin < 0.002:
            call()
            done += 1
        times.append((time.process_time() - begin) / done)
    return 1000 * statistics.median(times)


@dataclass
class Study:
    """The measurements of one experiment, saved after each one, so that a run can go on.

    Attributes:
        name: Of the experiment.
        settings: What the measurements depend on; others are discarded.
        folder: Where ``NAME.json``, ``NAME.svg`` and the trained weights are kept.
        seeds: How many runs each contender gets.
        measured: What has been measured, by key.
        seconds: Spent on it so far, over all sessions.
    """

    name: str
    settings: Row
    folder: Path
    seeds: int
    measured: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        path = self.folder / f"{self.name}.json"
        if path.exists():
            saved = json.loads(path.read_text("utf-8"))
            if saved["settings"] == json.loads(json.dumps(self.settings)):
                self.measured, self.seconds = saved["measured"], saved["seconds"]

    def measure(self, key: str, measurement: Callable[[], Any]) -> Any:
        """The result of ``measurement``, or what is saved under this key."""
        if key not in self.measured:
            begin, earlier = time.process_time(), self.seconds
            self.measured[key] = _rounded(measurement())
            # a measurement may contain others, whose time is in this one's
            self.seconds = earlier + time.process_time() - begin
            self.save()
        return self.measured[key]

    def weights(self, key: str) -> Path:
        """Where the weights of this training are kept."""
        return self.folder / "weights" / self.name / f"{key.replace('/', ', ')}.pt"

    def keep(self, key: str, model: nn.Module) -> None:
        """Keep the weights of a trained model under this key."""
        self.weights(key).parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), self.weights(key))

    def train(self, key: str, model: nn.Module, training: Callable[[], Any]) -> None:
        """Give ``model`` its weights after ``training``, or those kept under this key."""
        if not self.weights(key).exists():
            self.measured.pop(key, None)
            self.measure(key, training)
            self.keep(key, model)
        model.load_state_dict(torch.load(self.weights(key), weights_only=True))

    def search(
        self, contender: str, run: Callable[[str, float, int], Row], rates: str = "rates"
    ) -> float:
        """The rate of those in the settings with the lowest ``loss`` on the search seed.

        Args:
            contender: Its name, the beginning of its keys.
            run: Called with a key, a rate and a seed; returns at least a ``loss``.
            rates: Where in the settings the rates are.
        """
        choice: list[float] = self.settings[rates]
        losses: list[float] = []
        for rate in choice if len(choice) > 1 else []:
            key = f"{contender}/rate {rate:g}"
            loss = self.measure(key, lambda k=key, r=rate: run(k, r, SEARCH_SEED))["loss"]
            losses.append(loss if math.isfinite(loss) else math.inf)
        return choice[losses.index(min(losses))] if losses else choice[0]

    def compare(
        self, contender: str, run: Callable[[str, float, int], Row], rates: str = "rates"
    ) -> None:
        """Search the rate as `search` does, then run every seed with it."""
        rate = self.search(contender, run, rates)
        for seed in range(self.seeds):
            key = f"{contender}/seed {seed}"
            self.measure(key, lambda k=key, s=seed: run(k, rate, s))

    def over_seeds(self, contender: str, *path: str) -> list[Any]:
        """One number, or list, of every seed: ``measured["CONTENDER/seed 0"][path[0]]...``."""
        found = [self.measured[f"{contender}/seed {seed}"] for seed in range(self.seeds)]
        for name in path:
            found = [one[name] for one in found]
        return found

    def rate(self, contender: str) -> str:
        """The learning rate that was chosen for it."""
        return f"{self.measured[f'{contender}/seed 0']['rate']:g}"

    def cells(self, contender: str, *path: str, digits: int = 3) -> list[str]:
        """Mean and spread over seeds of each number in a list, for a line of a table."""
        columns = zip(*self.over_seeds(contender, *path), strict=True)
        return [mean_and_spread(column, digits) for column in columns]

    def bands(self, contenders: Iterable[str], path: str, xs: Iterable[float]) -> list[Row]:
        """`band` of each contender, under its name."""
        xs = list(xs)
        return [row for c in contenders for row in band(self.over_seeds(c, path), xs, c)]

    def save(self) -> None:
        """Write ``NAME.json``; what was there stays whole until the new one is."""
        self.folder.mkdir(parents=True, exist_ok=True)
        packages = {name: version(name) for name in ("torch", "numpy", "altair")}
        content = {
            "name": self.name,
            "date": datetime.now(UTC).date().isoformat(),
            "versions": {"python": platform.python_version(), **packages},
            "machine": f"{platform.system()} {platform.machine()}, one thread",
            "seconds": round(self.seconds, 1),
            "seeds": self.seeds,
            "settings": self.settings,
            "measured": self.measured,
        }
        path = self.folder / f"{self.name}.json"
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        draft.replace(path)


def _rounded(value: Any) -> Any:
    """The value with numbers of five digits, which is more than three seeds can tell."""
    if isinstance(value, Mapping):
        return {str(key): _rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_rounded(part) for part in value]
    return float(f"{value:.5g}") if isinstance(value, float | np.floating) else value


# --- tables and pictures ---------------------------------------------------------------------


def mean_and_spread(values: Sequence[float], digits: int = 3) -> str:
    """``mean ± standard deviation`` over seeds."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {spread:.{digits}f}"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; the first column is text, the others numbers."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def band(curves: Sequence[Sequence[float]], xs: Iterable[float], series: str) -> list[Row]:
    """A row for each ``x``: mean, lowest and highest of the curves of all seeds."""
    return [
        {"series": series, "x": x, "mean": statistics.mean(y), "low": min(y), "high": max(y)}
        for x, *y in zip(xs, *curves, strict=True)
    ]


COLOURS = ["#3b7dd8", "#d9730d", "#2a9d5c", "#9b5fc0", "#d64550", "#1798a6", "#a0693a", "#80858f"]
DASHES = [[1, 0], [7, 3], [2, 2], [9, 3, 2, 3], [4, 2], [12, 3], [1, 3], [6, 2, 1, 2]]


def log2(title: str, values: Sequence[int]) -> alt.X:
    """A logarithmic axis with these values, each twice the one before."""
    scale, axis = alt.Scale(type="log", base=2), alt.Axis(values=list(values), format="d")
    return alt.X("x:Q", title=title, scale=scale, axis=axis)


def lines(
    rows: Sequence[Row],
    series: Sequence[str],
    *,
    x: alt.X,
    y: alt.Y,
    title: str = "",
    width: int = 300,
    height: int = 230,
) -> alt.LayerChart:
    """Mean curves with bands from the lowest to the highest seed, a colour and dash for each."""
    chart = alt.Chart(alt.Data(values=list(rows))).transform_filter(
        alt.FieldOneOfPredicate("series", list(series))
    )
    told: Row = {"title": None, "sort": None, "legend": alt.Legend(columns=max(2, width // 150))}
    colours = alt.Scale(domain=list(series), range=COLOURS)
    colour = alt.Color("series:N", scale=colours, **told)
    dashes = alt.Scale(domain=list(series), range=DASHES)
    dash = alt.StrokeDash("series:N", scale=dashes, **told)
    bands = chart.mark_area(opacity=0.25, clip=True).encode(
        x=x, y=alt.Y("low:Q", title=y["title"], scale=y["scale"]), y2="high:Q", color=colour
    )
    means = chart.mark_line(strokeWidth=2, clip=True).encode(
        x=x, y=y, color=colour, strokeDash=dash
    )
    return alt.layer(bands, means).properties(title=title, width=width, height=height)
