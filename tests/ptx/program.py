"""PTX, read: instructions in basic blocks.

Only what Triton writes for a kernel of its own is read: one entry, no calls.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

_SIZES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8, "u8": 1, "u16": 2, "u32": 4, "u64": 8}
_MANY = {"v2", "v4", "x1", "x2", "x4"}
_KINDS = {
    *_MANY, "pred", "f32x2", "bf16x2", "f16x2", "bf16",
    *(f"{letter}{size}" for letter in "bus" for size in (8, 16, 32, 64)),
    *(f"f{size}" for size in (16, 32, 64)),
}  # fmt: skip
#: A register, a number, a name, what stands in brackets; or several of them, which are a vector.
Operand = Any


class Instruction(NamedTuple):
    """``@guard name.kinds operands``."""

    guard: str  # "" for none, "!%p1" for the opposite
    name: tuple[str, ...]
    operands: tuple[Operand, ...]

    @property
    def form(self) -> str:
        """The name without kinds of numbers, and how many there are."""
        return ".".join(part for part in self.name if part not in _KINDS)

    @property
    def kinds(self) -> list[str]:
        """Of numbers, in order."""
        return [part for part in self.name if part in _KINDS and part not in _MANY]

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{'.'.join(self.name)} {', '.join(map(str, self.operands))}"


@dataclass(frozen=True)
class Program:
    """A kernel."""

    parameters: dict[str, tuple[int, int]]  # name: place, and size in bytes
    threads: int
    instructions: list[Instruction]
    labels: dict[str, int]  # which instruction comes next

    @cached_property
    def leaders(self) -> list[int]:
        """Where basic blocks begin, and the end."""
        found = {0, len(self.instructions), *self.labels.values()}
        for at, instruction in enumerate(self.instructions):
            if instruction.name[0] in ("bra", "ret", "bar"):
                found |= {at, at + 1}
        return sorted(found)


def read(text: str) -> Program:
    """The only entry of a PTX module."""
    text = re.sub(r"//[^\n]*|^\s*\.loc[^\n]*", "", text, flags=re.MULTILINE)
    entry = re.search(r"\.visible \.entry (\w+)\((.*?)\)(.*?)\{(.*)\n\}", text, re.DOTALL)
    assert entry is not None, "one entry"
    _, declared, directives, body = entry.groups()
    parameters: dict[str, tuple[int, int]] = {}
    place = 0
    for kind, name in re.findall(r"\.param \.(\w+).*? (\w+)(?:,|\s*$)", declared, re.MULTILINE):
        size = _SIZES[kind]
        place = -(-place // size) * size
        parameters[name] = place, size
        place += size
    threads = re.search(r"\.reqntid (\d+)", directives)
    assert threads is not None, "a number of threads"
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for statement in body.split(";"):
        rest = statement.strip()
        while found := re.match(r"(\$?\w+):\s*|[{}]\s*", rest):
            if found[1]:
                labels[found[1]] = len(instructions)
            rest = rest[found.end() :]
        if rest and not rest.startswith("."):
            instructions.append(_instruction(rest))
    return Program(parameters, int(threads[1]), instructions, labels)


def _instruction(text: str) -> Instruction:
    found = re.match(r"(?:@(!?%\w+)\s+)?([\w.:]+)\s*(.*)", text, re.DOTALL)
    assert found is not None, text
    guard, name, rest = found.groups()
    operands: list[Operand] = []
    for vector, address, single in re.findall(r"\{([^}]*)\}|\[([^\]]*)\]|([^,\s][^,]*)", rest):
        if vector:
            operands.append(tuple(each.strip() for each in vector.split(",")))
        else:
            operands.append((address or single).strip())
    return Instruction(guard or "", tuple(name.replace("::", ".").split(".")), tuple(operands))
