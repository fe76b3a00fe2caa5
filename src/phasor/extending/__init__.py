"""Longer contexts: the laws that extend a rope, and their effect on phases and cosines.

`plan_extension` compares the laws for a longer context, `coverage` computes which phases are new.
"""

from __future__ import annotations

from phasor.extending.phases import Coverage, coverage
from phasor.extending.planning import ExtensionOption, ExtensionPlan, plan_extension

__all__ = ["Coverage", "ExtensionOption", "ExtensionPlan", "coverage", "plan_extension"]
