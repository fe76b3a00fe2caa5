"""Longer contexts: `plan_extension` for a model, with each law's effects and its config."""

from __future__ import annotations

from phasor.extending.planning import ExtensionOption, ExtensionPlan, plan_extension

__all__ = ["ExtensionOption", "ExtensionPlan", "plan_extension"]
