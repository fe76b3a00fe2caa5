"""All defects of the museum, in the order of their files."""

from . import frequencies, layouts, positions
from .museum import Defect

DEFECTS = [
    one
    for module in (frequencies, layouts, positions)
    for one in vars(module).values()
    if isinstance(one, Defect)
]
