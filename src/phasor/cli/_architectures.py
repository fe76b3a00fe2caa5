"""``phasor identify transformers:NAME`` and ``--list``: architectures, by what their classes do."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from phasor.cli._common import need_torch, say_json
from phasor.configs import language_models, read_source
from phasor.errors import ConfigError

if TYPE_CHECKING:
    from phasor.torch.hf.verdicts import Verdict

_PREFIX = "transformers:"


def is_architecture(text: str) -> bool:
    """Whether ``text`` names an architecture of transformers, by class or by model type."""
    # a dotted module has the colon later: transformers.models.llama...:function
    return text.startswith(_PREFIX)


def judge(text: str, config: str | None, *, as_json: bool) -> None:
    """Print what phasor says of one architecture; exit status 1 if its class does otherwise."""
    need_torch("a recorded model")
    from phasor.torch.hf.architectures import model_class
    from phasor.torch.hf.verdicts import verdict

    name = text.removeprefix(_PREFIX)
    said = None if config is None else text_config(config)
    model_type = model_class(name).config_class.model_type
    if said is not None and said.get("model_type") not in (None, model_type):
        raise ConfigError(
            f"{config} describes a {said['model_type']!r}, not {name!r}; give "
            f"{_PREFIX}{said['model_type']}"
        )
    found = verdict(name, said)
    if as_json:
        say_json(found.as_plain())
    else:
        from phasor.terminal._architectures import print_verdict

        print_verdict(found)
    sys.exit(0 if found.right else 1)


def judge_all(*, as_json: bool) -> None:
    """Print the table of all architectures; exit status 1 if any is wrong."""
    need_torch("the table of architectures")
    from phasor.terminal._architectures import print_verdicts
    from phasor.terminal._extending import progress_bar
    from phasor.torch.hf.architectures import model_types, not_built

    found: list[Verdict] = []
    with progress_bar("Recording transformers") as progress:
        names = model_types()
        for done, name in enumerate(names):
            progress(done, len(names))
            found.append(_tried(name))
    found += [_absent(name, why) for name, why in not_built().items()]
    if as_json:
        say_json([one.as_plain() for one in found])
    else:
        print_verdicts(found)
    sys.exit(0 if all(one.right or one.not_built for one in found) else 1)


def text_config(path: str) -> Mapping[str, Any]:
    """The config of the language model in a config file, which may lie inside a larger one."""
    return language_models(read_source(path))[-1].values


def _tried(name: str) -> Verdict:
    from phasor.torch.hf.verdicts import verdict

    try:
        return verdict(name)
    except ConfigError as error:
        return _absent(name, str(error))


def _absent(name: str, why: str) -> Verdict:
    from phasor.torch.hf.verdicts import Verdict

    return Verdict(model_type=name, not_built=why)
