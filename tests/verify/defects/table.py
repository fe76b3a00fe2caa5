"""All defects of the museum, in the order of their files."""

from . import frequencies, layouts, positions
from .museum import Defect

#: By what a file of them is about.
GROUPS = {
    str(module.__doc__): [one for one in vars(module).values() if isinstance(one, Defect)]
    for module in (frequencies, layouts, positions)
}
DEFECTS = [one for group in GROUPS.values() for one in group]
