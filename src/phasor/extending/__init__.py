"""Longer contexts: the `plan` for a model, with each law's effects and its config."""

from __future__ import annotations

from phasor.extending.planning import ExtensionPlan, Way, plan

__all__ = ["ExtensionPlan", "Way", "plan"]
