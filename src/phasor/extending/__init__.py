"""Longer contexts: the laws that reach one, what each does to the phases and to the cosines.

`plan_extension` puts the laws for a longer context side by side, `coverage` says which phases one
adds.
"""

from __future__ import annotations

from phasor.extending.phases import Coverage, coverage
from phasor.extending.planning import ExtensionOption, ExtensionPlan, plan_extension

__all__ = ["Coverage", "ExtensionOption", "ExtensionPlan", "coverage", "plan_extension"]
