"""Draw the pictures of the README and the documentation: ``make figures``."""

from dataclasses import replace
from pathlib import Path

import phasor
from phasor.figures import precision_figure, wavelength_figure

IMAGES = Path(__file__).parent / "images"


def main() -> None:
    """Write every picture."""
    rope = phasor.preset("llama-3.1-8b")[0]
    plain = replace(rope, scaling=None)
    laws = {
        "plain, base 500 000": plain,
        "Llama 3, factor 8": rope,
        "linear, factor 8": replace(plain, scaling=phasor.Linear(factor=8.0)),
        "NTK-aware, factor 8": replace(plain, scaling=phasor.NTK(factor=8.0)),
        "YaRN, factor 8": replace(
            plain, scaling=phasor.Yarn(factor=8.0, original_max_positions=8192)
        ),
    }
    pictures = {
        "precision": precision_figure(phasor.Rope(head_dim=128, pairing="half")),
        "wavelengths": wavelength_figure(laws, context=8192),
    }
    for name, figure in pictures.items():
        path = IMAGES / f"{name}.png"
        figure.savefig(path, dpi=150)
        print(path)


if __name__ == "__main__":
    main()
