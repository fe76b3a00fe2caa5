"""What the command line prints, drawn with rich: colours on a terminal, plain text elsewhere."""

from phasor.terminal._architectures import print_verdict, print_verdicts
from phasor.terminal._extending import print_plan, progress_bar, waiting
from phasor.terminal._ropes import print_comparison, print_model
from phasor.terminal._screen import Screen

__all__ = [
    "Screen",
    "print_comparison",
    "print_model",
    "print_plan",
    "print_verdict",
    "print_verdicts",
    "progress_bar",
    "waiting",
]
