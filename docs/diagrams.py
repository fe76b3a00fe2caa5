"""The drawings of docs/architecture.md: boxes in rows, and arrows between them.

``make figures`` writes them. What a drawing says is data, at the end of this
file; tests/test_diagrams.py holds it to the code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from phasor.charts.style import LIGHT, picture_stylesheet

# on a phone of 390 pixels, labels of 12 are 9
WIDTH, FONT, LINE = 460, 12, 16
PADDING, GAP = 9, 30  # inside a box, and between rows
# generous: no reader's font is wider than DejaVu Sans, in which these hold
CHARACTER, BOLD_CHARACTER = 6.9, 8.1


class Box(NamedTuple):
    """A value that is passed on, or a step that makes one of others."""

    title: str
    lines: Sequence[str] = ()
    at: float = 0.5  # the middle, as a share of the width
    is_value: bool = False
    is_wide: bool = False  # from edge to edge
    in_code: str = ""  # the module or object that the box is, if it is one

    @property
    def width(self) -> float:
        if self.is_wide:
            return WIDTH
        texts = [BOLD_CHARACTER * len(self.title)]
        texts += [CHARACTER * len(line) for line in self.lines]
        return max(texts) + 2 * PADDING

    @property
    def height(self) -> float:
        return LINE * (1 + len(self.lines)) + 2 * PADDING - 4

    @property
    def left(self) -> float:
        """The left edge, inside of the drawing."""
        wanted = self.at * WIDTH - self.width / 2
        return min(max(wanted, 0), WIDTH - self.width)


class Diagram(NamedTuple):
    """Rows from top to bottom, and arrows by the titles of boxes."""

    rows: Sequence[Sequence[Box]]
    arrows: Sequence[tuple[str, str]]


def draw(diagram: Diagram) -> str:
    """The drawing, as the text of an SVG file."""
    tops: dict[str, float] = {}
    boxes: dict[str, Box] = {}
    y = 1.0
    for row in diagram.rows:
        for box in row:
            boxes[box.title], tops[box.title] = box, y
        y += max(box.height for box in row) + GAP
    shapes = [shape for box in boxes.values() for shape in _box(box, tops)]
    for start, end in diagram.arrows:
        shapes += _arrow(boxes[start], boxes[end], tops)
    size = f'width="{WIDTH + 2}" height="{y - GAP + 1:g}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    font = 'font-family="DejaVu Sans, Verdana, sans-serif"'
    style = f"<style>{picture_stylesheet()}</style>"
    group = f'<g transform="translate(1 0)" {font} font-size="{FONT}">'
    return "\n".join([opening, style, group, *shapes, "</g>", "</svg>", ""])


def _box(box: Box, tops: dict[str, float]) -> Iterator[str]:
    top = tops[box.title]
    fill = LIGHT["grid"] if box.is_value else "none"
    stroke = LIGHT["rule"]
    size = f'width="{box.width:g}" height="{box.height:g}"'
    yield (
        f'<rect x="{box.left:g}" y="{top:g}" {size} rx="6" '
        f'fill="{fill}" stroke="{stroke}"/>'
    )
    middle, baseline = box.left + box.width / 2, top + PADDING + FONT - 3
    for number, line in enumerate((box.title, *box.lines)):
        weight = "" if number else ' font-weight="bold"'
        yield (
            f'<text x="{middle:g}" y="{baseline + number * LINE:g}" '
            f'text-anchor="middle"{weight} fill="{LIGHT["ink"]}">'
            f"{escape(line)}</text>"
        )


def _arrow(start: Box, end: Box, tops: dict[str, float]) -> Iterator[str]:
    """A line, upright where one box is above the other, level in a row."""
    from_x = start.left + start.width / 2
    to_x = end.left + end.width / 2
    if end.left + PADDING < from_x < end.left + end.width - PADDING:
        to_x = from_x
    elif start.left + PADDING < to_x < start.left + start.width - PADDING:
        from_x = to_x
    from_y = tops[start.title] + start.height
    to_y = tops[end.title]
    if tops[start.title] == tops[end.title]:
        from_x, to_x = start.left + start.width, end.left
        from_y = to_y = to_y + min(start.height, end.height) / 2
    length = ((to_x - from_x) ** 2 + (to_y - from_y) ** 2) ** 0.5
    # unit vectors along the arrow and across it
    along_x, along_y = (to_x - from_x) / length, (to_y - from_y) / length
    back_x, back_y = to_x - 8 * along_x, to_y - 8 * along_y
    across_x, across_y = 4 * along_y, -4 * along_x
    rule = LIGHT["rule"]
    yield (
        f'<path d="M{from_x:.1f} {from_y:.1f}L{back_x:.1f} {back_y:.1f}" '
        f'stroke="{rule}" stroke-width="1.5" fill="none"/>'
    )
    yield (
        f'<path d="M{to_x:.1f} {to_y:.1f}'
        f"L{back_x + across_x:.1f} {back_y + across_y:.1f}"
        f'L{back_x - across_x:.1f} {back_y - across_y:.1f}Z" fill="{rule}"/>'
    )


def value(title: str, *lines: str, at: float = 0.5, code: str = "") -> Box:
    """A value."""
    return Box(title, lines, at, is_value=True, in_code=code)


def wide_value(title: str, *lines: str) -> Box:
    """A value from edge to edge."""
    return Box(title, lines, is_value=True, is_wide=True)


def step(title: str, *lines: str, at: float = 0.5, code: str = "") -> Box:
    """A step."""
    return Box(title, lines, at, in_code=code)


def wide_step(title: str, *lines: str, code: str = "") -> Box:
    """A step from edge to edge."""
    return Box(title, lines, is_wide=True, in_code=code)


VALUES = Diagram(
    [
        [
            value("a config file or preset", at=0.24),
            value("positions", "where tokens stand", at=0.8),
        ],
        [
            value(
                "Rope",
                "pairing, slice, frequencies,",
                "axes, attention factor",
                at=0.24,
                code="rope.Rope",
            )
        ],
        [
            Box(
                "Rotation",
                (
                    "cos and sin [..., seq, num_pairs], their factor in them,",
                    "and which coordinates they turn",
                ),
                is_value=True,
                is_wide=True,
                in_code="torch.rotation.Rotation",
            )
        ],
        [
            value("layer 0", "turns q and k", at=0.14),
            value("layer 1", "turns q and k", at=0.5),
            value("layer 2 …", "turns q and k", at=0.86),
        ],
    ],
    [
        ("a config file or preset", "Rope"),
        ("Rope", "Rotation"),
        ("positions", "Rotation"),
        ("Rotation", "layer 0"),
        ("Rotation", "layer 1"),
        ("Rotation", "layer 2 …"),
    ],
)

#: Rooms of tests/test_architecture.py; arrows are imports that no other
#: arrow implies.
ROOMS = Diagram(
    [
        [wide_step("core", "errors, scaling, axes, Rope, angles, positions")],
        [
            step("files", "configs, weights", at=0.5),
            step("jax", "functions", at=0.0),
            step("mlx", "functions", at=0.95),
        ],
        [
            step("identification", "identify, diff, verify", at=0.15),
            step("extending", "longer contexts", at=0.73),
        ],
        [
            step("testing", "assert_rotates", at=0.0),
            step("phasor", "public names", at=0.375),
            step("papers", "what they say", at=0.73),
        ],
        [
            step("torch", "operator, modules", at=0.543),
            step("charts", "pictures, report", at=0.97),
        ],
        [wide_step("cli", "a file for each command")],
    ],
    [
        ("core", "files"),
        ("core", "jax"),
        ("core", "mlx"),
        ("files", "identification"),
        ("files", "extending"),
        ("identification", "testing"),
        ("identification", "phasor"),
        ("extending", "papers"),
        ("papers", "torch"),
        ("papers", "charts"),
        ("phasor", "cli"),
        ("torch", "cli"),
        ("charts", "cli"),
    ],
)

CALL = Diagram(
    [
        [wide_value("rotate_qk(q, k, positions, rope)")],
        [
            wide_step(
                "functional",
                "views with tokens first; the rope's text and factor",
                code="torch.functional",
            )
        ],
        [
            step(
                "arguments",
                "checks everything once,",
                "in one wording",
                at=0.76,
                code="torch._operator.arguments",
            )
        ],
        [
            step(
                "cos_sin",
                "positions to cos and sin",
                at=0.76,
                code="torch._operator.ops.cos_sin",
            )
        ],
        [
            step(
                "turn",
                "q and k by cos and sin",
                at=0.76,
                code="torch._operator.ops.turn",
            )
        ],
        [
            step(
                "try_turn_at",
                "plain CPU tensors:",
                "all in one pass",
                at=0.0,
                code="torch._operator.ops.try_turn_at",
            ),
            step("cpu", "C++", at=0.42, code="torch._operator.cpu"),
            step(
                "triton", "one launch", at=0.64, code="torch._operator.triton"
            ),
            step(
                "eager", "plain torch", at=0.99, code="torch._operator.eager"
            ),
        ],
        [wide_value("rotated q and k, of the same shape, dtype and strides")],
    ],
    [
        ("rotate_qk(q, k, positions, rope)", "functional"),
        ("functional", "try_turn_at"),
        ("functional", "arguments"),
        ("arguments", "cos_sin"),
        ("cos_sin", "turn"),
        ("turn", "cpu"),
        ("turn", "triton"),
        ("turn", "eager"),
        (
            "try_turn_at",
            "rotated q and k, of the same shape, dtype and strides",
        ),
        ("cpu", "rotated q and k, of the same shape, dtype and strides"),
        ("triton", "rotated q and k, of the same shape, dtype and strides"),
        ("eager", "rotated q and k, of the same shape, dtype and strides"),
    ],
)

BACKWARD = Diagram(
    [
        [wide_value("gradient of the rotated q and k")],
        [
            value("positions", "kept by rotate_qk", at=0.12),
            value(
                "cos and sin of a Rotation",
                "kept once for all layers",
                at=0.98,
            ),
        ],
        [
            step(
                "cos_sin",
                "made again",
                at=0.12,
                code="torch._operator.ops.cos_sin",
            )
        ],
        [
            wide_step(
                "turn, transposed",
                "sin changes its sign; the pairing that was written is read",
                code="torch._operator.ops.turn",
            )
        ],
        [wide_value("gradient of q and k")],
    ],
    [
        ("gradient of the rotated q and k", "turn, transposed"),
        ("positions", "cos_sin"),
        ("cos_sin", "turn, transposed"),
        ("cos and sin of a Rotation", "turn, transposed"),
        ("turn, transposed", "gradient of q and k"),
    ],
)

CONFIG = Diagram(
    [
        [wide_value("a file, folder, dictionary or config object")],
        [
            wide_step(
                "texts, gguf_header",
                "bytes to plain values, within a budget of memory",
                code="files.texts",
            )
        ],
        [
            Box(
                "JsonObject",
                ("values with their paths; knows which keys were read",),
                is_value=True,
                is_wide=True,
                in_code="files.configs.source.JsonObject",
            )
        ],
        [
            step(
                "model_class",
                "what the class of a type",
                "of transformers makes of it",
                at=0.0,
                code="files.configs.model_class",
            ),
            step(
                "programs and",
                "dialects: each",
                "format by its own words",
                at=1.0,
                code="files.dialects.programs",
            ),
        ],
        [
            value(
                "ModelConfig",
                "defaults filled in; kinds of layers",
                at=0.0,
                code="files.configs.model_class.ModelConfig",
            )
        ],
        [
            wide_step(
                "ropes, rope_blocks",
                "a Rope for each kind of layers, with its law and axes",
                code="files.configs.ropes",
            )
        ],
        [
            wide_step(
                "unread_keys",
                "what nothing read is neutral, noted or refused",
                code="files.configs.unread_keys",
            )
        ],
        [
            Box(
                "LayerRopes",
                ("a Rope or None for each layer, context, notes",),
                is_value=True,
                is_wide=True,
                in_code="layers.LayerRopes",
            )
        ],
    ],
    [
        ("a file, folder, dictionary or config object", "texts, gguf_header"),
        ("texts, gguf_header", "JsonObject"),
        ("JsonObject", "model_class"),
        ("JsonObject", "programs and"),
        ("model_class", "ModelConfig"),
        ("ModelConfig", "ropes, rope_blocks"),
        ("programs and", "ropes, rope_blocks"),
        ("ropes, rope_blocks", "unread_keys"),
        ("unread_keys", "LayerRopes"),
    ],
)

VERDICT = Diagram(
    [
        [
            value("a recording", "q and q_rotated, or tables", at=0.0),
            value("a function", "asked with probes", at=1.0),
        ],
        [
            wide_step(
                "recordings, calling",
                "the order of dimensions; vectors before and after",
                code="identification.recordings",
            )
        ],
        [
            step(
                "rotates_as",
                "each token within the bound",
                "of the Rope that was meant?",
                at=0.0,
                code="identification.turns.rotates_as",
            ),
            value("nothing differs", "the verdict is false", at=1.0),
        ],
        [
            wide_step(
                "layout, turns, spectrum",
                "which coordinates turn together, by which angle at each token",
                code="identification.turns",
            )
        ],
        [
            step("positions", at=0.0, code="identification.positions"),
            step("frequencies", at=0.384, code="identification.frequencies"),
            step("roundings", at=0.668, code="identification.roundings"),
            step("members", at=1.0, code="identification.members"),
        ],
        [
            wide_step(
                "causes",
                "hypotheses in order; the first that turns the tokens alike",
                code="identification.causes",
            )
        ],
        [
            Box(
                "Verification",
                ("a name and a sentence for each difference",),
                is_value=True,
                is_wide=True,
                in_code="identification.report.Verification",
            )
        ],
    ],
    [
        ("a recording", "recordings, calling"),
        ("a function", "recordings, calling"),
        ("recordings, calling", "rotates_as"),
        ("rotates_as", "nothing differs"),
        ("rotates_as", "layout, turns, spectrum"),
        ("layout, turns, spectrum", "positions"),
        ("layout, turns, spectrum", "frequencies"),
        ("layout, turns, spectrum", "roundings"),
        ("layout, turns, spectrum", "members"),
        ("positions", "causes"),
        ("frequencies", "causes"),
        ("roundings", "causes"),
        ("members", "causes"),
        ("causes", "Verification"),
    ],
)

#: Every drawing, by its file in docs/images.
DIAGRAMS = {
    "architecture-values": VALUES,
    "architecture-rooms": ROOMS,
    "architecture-call": CALL,
    "architecture-backward": BACKWARD,
    "architecture-config": CONFIG,
    "architecture-verdict": VERDICT,
}
