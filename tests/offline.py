"""No network: a test that opens a connection fails."""

from __future__ import annotations

import socket

import pytest


def refuse_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test is over."""

    def refused(*_: object) -> None:
        raise AssertionError("a connection was asked for")

    monkeypatch.setattr(socket.socket, "connect", refused)
