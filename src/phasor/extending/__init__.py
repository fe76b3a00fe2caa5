"""Longer contexts: `extensions` of one rope by each law, and the `plan` for a model's config."""

from __future__ import annotations

from phasor.extending.laws import Extension, extensions, with_raised_base
from phasor.extending.planning import ExtensionPlan, Way, plan

__all__ = ["Extension", "ExtensionPlan", "Way", "extensions", "plan", "with_raised_base"]
