"""``phasor verify``: does a recorded rotation match the checkpoint?"""

from __future__ import annotations

from typing import Any

import click

from phasor.cli.options import read_model, seq_len_option, takes_models
from phasor.cli.output import exit_with, progress_bar
from phasor.identification import verify as verify_recording


@click.command(epilog="Example: phasor verify llama-3.1-8b recording.npz")
@click.option(
    "--dims", metavar="LETTERS", help="Order of dimensions, such as bshd; detected by default."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@seq_len_option
@takes_models("model")
@click.argument("file", type=click.Path())
def verify(
    model: str,
    file: str,
    dims: str | None,
    as_json: bool,
    seq_len: int | None,
    **load_options: Any,
) -> None:
    """Compare a recorded rotation with MODEL, and name what differs.

    FILE is .safetensors or .npz, with positions, q and q_rotated, k and k_rotated; or cos and sin;
    or a cos_sin_cache. If layers rotate differently, name the layers: layers.3.q is q of layer 3.
    Exits with 1 if something differs.
    """
    layers = read_model(model, **load_options)
    with progress_bar("Verifying") as progress:
        verification = verify_recording(layers, file, dims=dims, seq_len=seq_len, progress=progress)
    exit_with(verification, as_json=as_json)
