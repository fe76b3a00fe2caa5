"""The numbers in the prose of README and docs, with their sources: ``python -m tools.facts``.

Each fact is a sentence with a hole, and a function that computes what belongs there: from the
registries, from the code, from the files of results. A line for each is printed; one that the page
does not say so ends it with 1.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import phasor
from phasor import Rope
from phasor.angles import COS_SIN_ERROR, COS_SIN_ERROR_FLOAT32
from phasor.files.reading import model_types
from phasor.files.translation import TARGETS
from phasor.papers import angle_errors, decay
from phasor.scaling import REGISTRY

ROOT = Path(__file__).parents[1]
WORDS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
WORDS += ["eleven", "twelve"]
EXPERIMENTS = "examples/papers/results"


class Fact(NamedTuple):
    """One number on one page."""

    page: str
    sentence: str  # with {} where the number stands
    number: Callable[[], object]
    source: str


def load(path: str) -> Any:
    """A file of results."""
    return json.loads(read_text(path))


@cache
def read_text(path: str) -> str:
    """A file of the repository."""
    return (ROOT / path).read_text("utf-8")


def presets_in_doubt() -> int:
    """How many presets have a note that no source settles something."""
    notes = (phasor.preset(name).notes for name in phasor.preset_names())
    return sum(
        any(note.startswith("Uncertain: ") for note in preset_notes) for preset_notes in notes
    )


def lesson_lines() -> str:
    """How long the body of the lesson's ``rotate_by_hand`` is, without its docstring."""
    body = re.search(r"^def rotate_by_hand.*?\n\n\n", read_text("docs/lesson.md"), re.M | re.S)
    assert body is not None
    return WORDS[len(body[0].strip().splitlines()) - 2]


def recipes() -> str:
    """The sections of the page of recipes that have one."""
    sections = read_text("docs/own-rotation.md").split("\n## ")[1:]
    return WORDS[sum("```python" in section for section in sections)]


def floating(number: float) -> str:
    """A power of ten as the pages write it."""
    return f"{number:.0e}".replace("e-0", "e-").replace("e+0", "e")


def bound(number: float) -> str:
    """A bound on an error, of as many digits as it has."""
    return f"{number:g}".replace("e-0", "e-")


def usual_angle() -> str:
    """What the usual float32 angle is off by where Llama 3.1's context ends, base 10 000."""
    rope = Rope(head_dim=128, pairing="half", base=10_000.0)
    return floating(angle_errors(rope, 131_072 + np.arange(1024), "float32 angle").max())


def cpu_ratios(contender: str, reference: str) -> tuple[str, str]:
    """The least and the largest ratio of two medians of one case of ``bench/results/cpu.json``.

    Args:
        contender: Its name; ``others`` are all that are neither phasor nor a copy.
        reference: Its time is the divisor; followed by the pairing if it is phasor.
    """
    ratios = list[float]()
    for case in load("bench/results/cpu.json")["cases"].values():
        medians = {name: statistics.median(ts) for name, ts in case["seconds"].items() if ts}
        for name, median in medians.items():
            pairing = name.rpartition(", ")[2]
            other_label = reference if reference == "copy_" else f"{reference}, {pairing}"
            is_other = not name.startswith(("phasor", "copy_", "in-place"))
            chosen = is_other if contender == "others" else name == f"{contender}, {pairing}"
            if chosen and other_label in medians:
                ratios.append(median / medians[other_label])
    return f"{min(ratios):.2g}", f"{max(ratios):.2g}"


def rising_steps() -> str:
    """Steps on which RoFormer's curve rises, of 256."""
    rope = Rope(head_dim=128, pairing="interleaved")
    return f"{(np.diff(decay(rope, np.arange(257))) > 0).sum()} of 256"


def matrix_megabytes() -> str:
    """The largest matrix of ``elementwise``, kilobytes of 1024 as megabytes."""
    seeds = load(f"{EXPERIMENTS}/elementwise.json")["measured"]
    largest = max(seed["matrix, eq. 15"]["kilobytes"][-1] for seed in seeds.values())
    return f"{largest * 1024 / 1e6:.0f} MB"


def largest_difference() -> str:
    """How far the three rotations of ``elementwise`` are apart."""
    seeds = load(f"{EXPERIMENTS}/elementwise.json")["measured"]
    return f"{max(seed['largest difference'] for seed in seeds.values()):.1e}"


def xpos_limit() -> str:
    """The first position at which the key's factor of xPos is infinite in float32."""
    positions = np.arange(30_000, 40_000)
    smallest = 0.4 / 1.4
    with np.errstate(over="ignore"):
        factors = (smallest ** (-positions / 512.0)).astype(np.float32)
    return f"{positions[np.isinf(factors)][0]:,}"


def xpos_largest() -> str:
    """The largest factor in a segment of 2048."""
    return f"{(0.4 / 1.4) ** (-2047 / 512):.0f}"


def table_number(experiment: str, row: str, column: int, table: int = 0) -> float:
    """The number of a cell of the tables of an experiment, without its deviation.

    ``examples/papers/results/NAME.md`` has them, which a test compares with the measurements.
    """
    text = read_text(f"{EXPERIMENTS}/{experiment}.md")
    tables = [part for part in text.split("\n\n") if part.startswith("| ")]
    (cells,) = (
        line.split(" | ") for line in tables[table].splitlines() if line.startswith(f"| {row}")
    )
    return float(cells[column].split()[0])


def sizes(numbers: Sequence[float], digits: int) -> tuple[str, str]:
    """The least and the largest size of some numbers."""
    ordered = sorted(map(abs, numbers))
    return f"{ordered[0]:.{digits}f}", f"{ordered[-1]:.{digits}f}"


def secrets() -> tuple[str, str]:
    """What linear, NTK-aware and YaRN name more than the unchanged rope."""
    return sizes([table_number("longer_context", row, 2) for row in ("b: ", "c: ", "d: ")], 2)


def bits_fewer() -> tuple[str, str]:
    """What RoPE needs fewer for a word beyond the trained length."""
    return sizes([table_number("translation", "b: ", column, table=1) for column in (3, 4, 5)], 1)


def moved_bytes() -> str:
    """What sines and cosines lose elsewhere: their paired differences, as RoPE loses nothing."""
    here, there = (table_number("convergence", "b: sinusoidal", column) for column in (2, 3))
    return f"{there - here:.2f}"


def short(frequency: float) -> str:
    """Two digits and a power of ten."""
    return f"{frequency:.1e}".replace("e-0", "e-")


def band() -> tuple[str, str]:
    """The first pair of SmolLM2 with twice an equal share of usage, and its frequency."""
    measured = load(f"{EXPERIMENTS}/live_model.json")["measured"]
    queries, keys = (np.array(measured["usage"][side]) for side in ("queries", "keys"))
    product = queries * keys.repeat(queries.shape[1] // keys.shape[1], 1)  # [layers, heads, pairs]
    shares = (product / product.sum(-1, keepdims=True)).mean((0, 1))
    first = int(np.argmax(shares > 2 / len(shares)))
    return str(first), short(measured["model"]["base"] ** (-first / len(shares)))


def longest_pairs() -> tuple[str, ...]:
    """A layer's longest pair to its mean: values, queries, keys."""
    numbers = (table_number("live_model", row, 4, table=2) for row in ("values", "queries", "keys"))
    return tuple(f"{ratio:.1f}" for ratio in numbers)


def slow_bands() -> tuple[str, str]:
    """Where those of figure 10 begin: pair 40 of 64 at base 500 000, four fifths at 10 000."""
    return short(500_000.0 ** (-40 / 64)), short(10_000.0**-0.8)


def defects() -> int:
    """Rows of the table of published defects."""
    return len(re.findall(r"^\| (?!Symptom)", read_text("docs/verify-defects.md"), re.M))


def published() -> int:
    """How many config files with a reading of their own the tests have."""
    folder = ROOT / "tests/files/configs/published"
    return sum(len(file.read_text("utf-8").splitlines()) for file in folder.glob("*.jsonl"))


def reasons_to_refuse() -> int:
    """How many reasons there are to refuse a file, of all kinds."""
    tables = tomllib.loads(read_text("src/phasor/files/refusals.toml"))
    return sum(len(reasons) for reasons in tables.values())


def pairings() -> tuple[int, ...]:
    """How many presets read and write halves, interleaved pairs, and one as the other."""
    layouts = Counter(
        (rope.pairing, rope.output_pairing)
        for name in phasor.preset_names()
        for rope in phasor.preset(name).ropes[:1]
    )
    return tuple(layouts[layout] for layout in _LAYOUTS)


_LAYOUTS = ("half", "half"), ("interleaved", "interleaved"), ("interleaved", "half")


def proofs() -> tuple[object, ...]:
    """How many targets there are, and how many are run, were run, and are described."""
    checked = Counter(target.checked for target in TARGETS.values())
    counts = (WORDS[checked[kind]] for kind in ("run", "engine", "description"))
    return (len(TARGETS), *counts)


#: By page.
_BY_PAGE: dict[str, tuple[tuple[str, Callable[[], object], str], ...]] = {
    "README.md": (
        ("offset slices, {} laws and rules", lambda: len(REGISTRY), "phasor.scaling.REGISTRY"),
        (
            "{} published models by name",
            lambda: len(phasor.preset_names()),
            "phasor.preset_names()",
        ),
        ("* {} presets have an uncertain detail", presets_in_doubt, "notes of the presets"),
        ("power of ten: {} at 131 072 tokens", usual_angle, "phasor.papers.angle_errors"),
        ("accurate to {} in float32", lambda: bound(COS_SIN_ERROR_FLOAT32), "phasor.angles"),
        ("and {} in float64", lambda: bound(COS_SIN_ERROR), "phasor.angles"),
    ),
    "CHANGELOG.md": (
        (
            "within 1e-15 in float64 and {} in float32",
            lambda: bound(COS_SIN_ERROR_FLOAT32),
            "phasor.angles",
        ),
        ("`phasor.preset`: {} models", lambda: len(phasor.preset_names()), "phasor.preset_names()"),
        ("Tests reproduce {} published defects", defects, "docs/verify-defects.md"),
    ),
    "docs/lesson.md": (
        ("## 7. `rotate`, in {} lines", lesson_lines, "the block below it"),
        (
            "this model's loss grows by {} nats up to 2,048 tokens",
            lambda: f"{table_number('live_model', 'd: slowest quarter', 3, table=5):.2f}",
            "live_model.md",
        ),
        (
            "stop the fastest, and it grows by {}",
            lambda: f"{table_number('live_model', 'b: fastest quarter', 3, table=5):.1f}",
            "live_model.md",
        ),
    ),
    "docs/questions.md": (("(own-rotation.md) has {} recipes", recipes, "docs/own-rotation.md"),),
    "docs/own-rotation.md": (
        ("overflows in float32 from {} tokens on", xpos_limit, "zeta ** (-n / 512)"),
        ("segment of 2048 has factors up to {}", xpos_largest, "zeta ** (-n / 512)"),
    ),
    "docs/benchmarks.md": (
        (
            "takes {} to {} times as long as a copy",
            lambda: cpu_ratios("phasor, in place", "copy_"),
            "bench/results/cpu.json",
        ),
        (
            "new tensors, and take {} to {} times as long",
            lambda: cpu_ratios("others", "phasor, new output"),
            "bench/results/cpu.json",
        ),
    ),
    "docs/decisions/no-default-pairing.md": (
        (
            "{} read and write halves, {} interleaved pairs, and {} read one",
            pairings,
            "the presets",
        ),
    ),
    "docs/decisions/files-refuse.md": (
        ("{} model types are known", lambda: f"{len(model_types()):,}", "model_types()"),
        ("compare {} published configs", published, "tests/files/configs/published"),
        ("each of the {} reasons to refuse", reasons_to_refuse, "refusals.toml"),
    ),
    "docs/decisions/settings-are-read-back.md": (
        (
            "Of {} targets {} are run in the tests, {} were run by `tools/engines.py`, and {} are",
            proofs,
            "phasor.files.translation.TARGETS",
        ),
    ),
    "docs/papers/convergence.md": (
        ("Sines and cosines lose {} bits from position 64 on", moved_bytes, "convergence.md"),
    ),
    "docs/papers/frequency-usage.md": (
        (
            "stopping a quarter at the fast end costs {} bits",
            lambda: f"{table_number('frequency_usage', 'f: ', 2):.3f}",
            "frequency_usage.md",
        ),
        (
            "is worse than p = 1**, by {} bits",
            lambda: f"{table_number('frequency_usage', 'c: ', 2):.3f}",
            "frequency_usage.md",
        ),
    ),
    "docs/papers/longer-context.md": (
        ("NTK-aware scaling find {} to {} of all secrets more", secrets, "longer_context.md"),
        (
            "YaRN is best, {} bits better",
            lambda: f"{-table_number('longer_context', 'd: ', 3):.2f}",
            "longer_context.md",
        ),
    ),
    "docs/papers/long-documents.md": (
        (
            "at four times it finds {} more of them",
            lambda: f"{-table_number('long_documents', 'b: ', 4):.3f}",
            "long_documents.md",
        ),
    ),
    "docs/papers/translation.md": (
        ("it needs {} to {} bits fewer per word", bits_fewer, "translation.md"),
        (
            "It translates {} % of the sentences of five dates without a mistake",
            lambda: f"{100 * table_number('translation', 'a: RoPE', 3):.0f}",
            "translation.md",
        ),
    ),
    "docs/papers/live-model.md": (
        (
            "**Most of the usage is in slow pairs**: {} in the slower half",
            lambda: f"{table_number('live_model', 'all', 3, table=1):.2f}",
            "live_model.md",
        ),
        (
            "begins at pair {}, the first pair with twice an equal share of the usage. Its "
            "frequency is {}",
            band,
            "live_model.json",
        ),
        (
            "between {} and {}, where the bands of figure 10 begin",
            slow_bands,
            "2410.06205, figure 10",
        ),
        (
            "its fastest quarter has {} of the usage, the last layer's {}",
            lambda: tuple(
                f"{table_number('live_model', f'{place} layer', 2, table=1):.3f}"
                for place in ("first", "last")
            ),
            "live_model.md",
        ),
        (
            "the strongest pair makes up {} of the {} by which",
            lambda: tuple(f"{table_number('live_model', 'sink', n, table=4):.1f}" for n in (3, 2)),
            "live_model.md",
        ),
        (
            "a mean cosine of {} with its key, and of heads that look at the previous token {}",
            lambda: tuple(
                f"{table_number('live_model', *cell, table=3):.2f}"
                for cell in (("diagonal", 2), ("previous", 3))
            ),
            "live_model.md",
        ),
        (
            "the longest pair of a layer is {} times its mean (queries {}, keys {})",
            longest_pairs,
            "live_model.md",
        ),
        (
            "no loss up to 512 tokens, and {} nats from there to 2048",
            lambda: f"{table_number('live_model', 'd: slowest quarter', 3, table=5):.2f}",
            "live_model.md",
        ),
    ),
    "docs/papers/decay.md": (
        ("Even the bound rises on {} steps", rising_steps, "phasor.papers.decay"),
    ),
    "docs/papers/elementwise.md": (
        ("of the width, to {} at 512", matrix_megabytes, "elementwise.json"),
        ("three results differ by {} at most", largest_difference, "elementwise.json"),
    ),
}
FACTS = tuple(Fact(page, *fact) for page, facts in _BY_PAGE.items() for fact in facts)


def find_wrong(facts: tuple[Fact, ...] = FACTS) -> Iterator[str]:
    """What a page says otherwise, a line each; the right ones are printed."""
    for page, sentence, number, source in facts:
        value = number()
        numbers = value if isinstance(value, tuple) else (value,)
        text = re.sub(r"\s+", " ", read_text(page))
        text_expected = sentence.format(*numbers)
        if text_expected in text:
            print(f"{page}: {text_expected}  [{source}]")
            continue
        pattern = re.escape(sentence).replace(re.escape("{}"), r"(\S+)")
        match = re.search(pattern, text)
        actual = f"says “{match[0]}”" if match else "has no such sentence"
        yield f"{page} {actual}; by {source} it is “{text_expected}”"


def main() -> int:
    """Print the facts, and what is wrong last."""
    faults = list(find_wrong())
    print(*(f"wrong: {fault}" for fault in faults), sep="\n", end="\n" if faults else "")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
