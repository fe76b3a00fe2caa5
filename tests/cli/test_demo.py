"""The demo proves what it prints, and says so when it cannot."""

from dataclasses import replace

import pytest

import phasor.cli.demo
import phasor.torch


def test_the_demo_holds(capsys):
    """Every result is within its bound, and the largest error is printed."""
    assert phasor.cli.demo.run()
    assert "within the bound" in capsys.readouterr().out


def test_the_demo_fails_on_a_wrong_rotation(monkeypatch, capsys):
    """A sign that is wrong makes the demo return false and print it."""
    right = phasor.torch.rotate_qk
    monkeypatch.setattr(
        phasor.torch,
        "rotate_qk",
        lambda q, k, p, rope, gain: right(q, k, p, replace(rope, direction=-1), gain=gain),
    )
    assert not phasor.cli.demo.run()
    assert "BEYOND THE BOUND" in capsys.readouterr().out


@pytest.mark.slow
def test_the_demo_sees_a_frequency_that_is_slightly_off(monkeypatch):
    """A base that is off by a part in 1e5 is caught."""
    right = phasor.torch.rotate_qk

    def wrong(q, k, p, rope, gain):
        return right(q, k, p, replace(rope, base=rope.base * (1 + 1e-5)), gain=gain)

    monkeypatch.setattr(phasor.torch, "rotate_qk", wrong)
    assert not phasor.cli.demo.run()
