"""Functions that are no rotation, or not every time: an error or a finding says what they are."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from phasor import TensorError
from phasor.cli.identify import identify as command
from phasor.identification import identify

from .defects import WIDTH, rotate, rotate_halves


class LastCall:
    """Turns by the positions of the call before."""

    def __init__(self):
        self.before = {}

    def __call__(self, x, positions):
        """Turn."""
        before = self.before.get(positions.shape, positions)
        self.before[positions.shape] = positions
        return rotate(x, before)


class FirstCall:
    """Keeps the cosines of the first call of a length."""

    def __init__(self):
        self.kept = {}

    def __call__(self, x, positions):
        """Turn."""
        return rotate(x, self.kept.setdefault(positions.shape, positions))


class Tiring:
    """Raises after a while."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x, positions):
        """Turn."""
        self.calls += 1
        if self.calls > 9:
            raise RuntimeError("no more")
        return rotate(x, positions)


def noisy(x, positions):
    """Dropout, of a kind."""
    return rotate(x, positions) + 1e-3 * np.random.default_rng().standard_normal(x.shape)


def complex_numbers(x, positions):
    """Pairs as complex numbers, and left so."""
    return rotate(x, positions).astype(np.complex128)


def eight_bits(x, positions):
    """As fast inference keeps keys."""
    import torch

    turned = torch.from_numpy(rotate(x.double().numpy(), positions.numpy()))
    return turned.to(torch.float8_e4m3fn)


def exiting(x, positions):
    """Ends the program."""
    sys.exit(3)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x, p: rotate(x, p).astype(int), "it returns int64, and not float64"),
        (lambda x, p: rotate(x, p) > 0, "it returns bool, and not float64"),
        (lambda x, p: rotate(x, p).astype(object), "it returns object, and not float64"),
        (complex_numbers, "it returns complex128, and not float64"),
        (eight_bits, "it returns float8_e4m3fn, and not float64"),
        (exiting, "SystemExit: 3"),
        (noisy, "equal calls differ: it is random"),
        (LastCall(), "equal calls differ: it is random, or remembers"),
        (FirstCall(), "remembers those of an earlier call"),
        (Tiring(), "whenever it is called, and fails for some of them: RuntimeError: no more"),
        (
            lambda x, p: np.where((p > 5)[..., None, None], np.nan, rotate(x, p)),
            "numbers that are not finite",
        ),
    ],
    ids=[
        "integers", "booleans", "objects", "complex", "float8", "exits", "random", "last call",
        "first call", "tires", "NaN at 6",
    ],
)  # fmt: skip
def test_what_can_be_no_rotation_is_refused_by_what_it_does(function, says):
    """In the first of the ways that are quoted, before those in which it raised."""
    with pytest.raises(TensorError) as refused:
        identify(function, WIDTH)
    assert says in str(refused.value)
    assert len(str(refused.value)) < 900


def test_a_program_that_ends_at_a_tables_end_has_a_table_that_ends():
    """sys.exit is as good as an exception."""

    def exiting_far(x, positions):
        if positions.max() >= 1000:
            sys.exit("too far")
        return rotate(x, positions)

    found = identify(exiting_far, WIDTH)
    assert (found.table_end, found.names()) == (1000, {"table-end-raises"})


def test_what_changes_now_and_then_is_said_to():
    """Whether by memory or by chance, no two of its calls can be compared."""
    calls = iter(range(1, 10_000))

    def erratic(x, positions):
        return rotate(x, positions) * (1.01 if next(calls) % 17 == 0 else 1)

    found = identify(erratic, WIDTH)
    assert "remembers" in found.names()
    assert "earlier calls, or on chance" in str(found)


def test_results_of_more_digits_than_float64_are_read():
    """As float64."""
    found = identify(lambda x, p: rotate(x.astype(np.longdouble), p), WIDTH, dtype="float64")
    assert (found.base, found.names()) == (10_000, set())


def test_what_a_function_prints_is_no_part_of_the_answer(tmp_path, monkeypatch):
    """Neither while its module is imported nor while it is called."""
    code = (
        "import numpy as np\nprint('loading')\n"
        "def chatty(x, positions):\n"
        "    print('turning', positions)\n"
        "    z = np.exp(1j * positions[..., None] * 500.0 ** (-np.arange(8) / 8))[:, :, None]\n"
        "    z = z * (x[..., :8] + 1j * x[..., 8:])\n"
        "    return np.concatenate([z.real, z.imag], -1).astype(x.dtype)\n"
    )
    (tmp_path / "chatty_rope.py").write_text(code, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    done = CliRunner().invoke(command, ["chatty_rope:chatty", "--head-dim", "16", "--json"])
    assert json.loads(done.stdout)["base"] == 500
    assert "loading" in done.stderr
    assert "turning" in done.stderr


def test_angles_that_are_rounded_leave_a_report():
    """To float16, so that no frequency holds as far as errors are measured."""

    def rounding(x, positions):
        angles = np.float32(positions[..., None]) * np.float32(5e5 ** (-np.arange(32) / 32))
        return rotate_halves(x, angles.astype(np.float16).astype(np.float32))

    found = identify(rounding, 64, dtype="float32")
    assert (found.pairing, found.precision) == ("half", ())
    assert "angles-in-float32" not in found.names()
