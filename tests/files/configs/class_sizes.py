"""Write ``configs/class_sizes.toml``: the sizes that configs of transformers assume.

Usage: python -m tests.files.configs.class_sizes > src/phasor/files/configs/class_sizes.toml
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import warnings
from collections.abc import Mapping
from functools import cache

import transformers
import transformers.models
from transformers import PreTrainedConfig

from phasor.files.configs.facts import table

_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads")


@cache
def config_classes() -> dict[str, type[PreTrainedConfig]]:
    """Every config class of transformers by its model type."""
    found: dict[str, type[PreTrainedConfig]] = {}
    for package in pkgutil.iter_modules(transformers.models.__path__):
        name = f"transformers.models.{package.name}.configuration_{package.name}"
        with contextlib.suppress(ImportError):
            module = importlib.import_module(name)
            for one in vars(module).values():
                mine = isinstance(one, type) and one.__module__ == name
                if mine and issubclass(one, PreTrainedConfig) and one.model_type:
                    found.setdefault(one.model_type, one)
    return found


def sizes(one: type[PreTrainedConfig], names: Mapping[str, tuple[str, ...]]) -> list[int]:
    """What an instance made of nothing says, 0 where it says none."""
    made = one()
    said: list[int] = []
    for size in _SIZES:
        given = [getattr(made, name, None) for name in names[size]]
        said.append(next((n for n in given if isinstance(n, int) and n > 0), 0))
    return said


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    classes = config_classes()
    print(
        "# Layers, width of the model and query heads that a class takes if a file leaves them out."
    )
    version = transformers.__version__
    print(f"# Printed by tests/files/configs/class_sizes.py from transformers {version}.")
    for name, facts in sorted(table().huggingface.items()):
        if facts.other_positions is None and facts.refused is None and name in classes:
            with contextlib.suppress(Exception):  # a class that cannot be made of nothing has none
                found = sizes(classes[name], facts.names)
                if any(found):
                    print(f"{name} = {found}")


if __name__ == "__main__":
    main()
