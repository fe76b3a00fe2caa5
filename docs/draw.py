"""Draw the pictures of the README and the documentation: ``make figures``.

The gallery says how: each picture of ``figures.md`` is the ``figure`` of the code below it.
"""

import re
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

DOCS = Path(__file__).parent
PICTURE_OR_CODE = re.compile(r"\]\((images/[\w-]+\.png)\)|^```python\n(.*?)^```", re.M | re.S)


def main() -> None:
    """Write every picture of the gallery."""
    names: dict[str, Any] = {}
    wanted = ""
    for found in PICTURE_OR_CODE.finditer((DOCS / "figures.md").read_text("utf-8")):
        picture, code = found.groups()
        if picture:
            wanted = picture
            continue
        exec(code, names)
        if wanted:
            drawn = BytesIO()
            names["figure"].savefig(drawn, dpi=150)
            # 256 colours are plenty for curves, and a third of the bytes
            image = Image.open(drawn).convert("RGB").quantize(256)
            image.save(DOCS / wanted, optimize=True)
            print(DOCS / wanted)
            wanted = ""


if __name__ == "__main__":
    main()
