"""How large everything is, in full and in small."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

#: Gradients of a batch are made in as many parts, and windows scored in as many at a time: fixed,
#: so that the numbers are those of any machine, however many processors it has.
WORKERS = 2
#: Laws of a rule for as many new tokens as the trained context has.
RULE_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Training:
    """A number of optimizer steps on windows of one length."""

    length: int
    steps: int
    batch: int
    rate: float
    warmup: int


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A model, its training, what comes after, and where it is measured."""

    width: int
    layers: int
    heads: int
    head_dim: int
    hidden: int
    base: float
    factor: int
    first: Training
    longer: Training
    windows: int  # at most; one a held-out file
    scored: int  # windows in one pass
    bin: int  # positions that share a number
    save_every: int  # steps

    @property
    def context(self) -> int:
        """Tokens of the first training."""
        return self.first.length

    @property
    def target(self) -> int:
        """Tokens of the longer context."""
        return self.longer.length

    def as_plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


FULL = Settings(
    width=96,
    layers=3,
    heads=3,
    head_dim=32,
    hidden=256,
    base=10_000.0,
    factor=4,
    first=Training(length=256, steps=2000, batch=8, rate=3e-3, warmup=100),
    longer=Training(length=1024, steps=40, batch=4, rate=1e-3, warmup=5),
    windows=128,
    scored=4,
    bin=32,
    save_every=50,
)
QUICK = Settings(
    width=32,
    layers=2,
    heads=2,
    head_dim=16,
    hidden=64,
    base=10_000.0,
    factor=4,
    first=Training(length=64, steps=40, batch=8, rate=3e-3, warmup=5),
    longer=Training(length=256, steps=4, batch=4, rate=5e-4, warmup=1),
    windows=12,
    scored=6,
    bin=16,
    save_every=10,
)
