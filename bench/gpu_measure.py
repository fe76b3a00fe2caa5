"""One case on a GPU: the gate, then every call and every replay in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from gpu_contenders import NORMED
from gpu_device import Device

from phasor.bench import (
    COPY,
    MULTIPLY,
    Call,
    Case,
    Contender,
    Measured,
    admitted,
    interleave,
)

#: A kernel without work on the grid of phasor's, for cases of decode.
EMPTY = "empty kernel"
REPLAYED = 20  # calls in a graph, where one is shorter than the launch of its graph
References = Callable[[Case, torch.Tensor], Mapping[str, Call]]


def measure_on(
    device: Device,
    case: Case,
    contenders: Sequence[Contender],
    *,
    seconds: float,
    references: References = lambda case, positions: {},
) -> Measured:
    """Check every contender against the truth, and time the calls and replays of the others.

    Args:
        device: Where.
        case: What.
        contenders: Who.
        seconds: Spent on the calls, and again on the replays.
        references: More calls to compare with, by name.
    """
    found, calls = admitted(case, contenders, device.where)
    calls = {**references(case, case.positions(device.where)), **calls}
    warm = 2 * case.size <= device.cache
    timed = device.timer(warm=warm)
    found.seconds.update(interleave(calls, seconds=seconds, warm=warm, timed=timed))
    times, capture = REPLAYED if warm else 1, device.capturer()
    replays: dict[str, Call] = {}
    for name, call in calls.items():
        try:
            replays[name] = capture(call, times)
        except Exception as reason:
            line = (str(reason).strip() or type(reason).__name__).splitlines()[0]
            found.left_out[f"{name}, as a graph"] = line[:160]
    samples = interleave(replays, seconds=seconds, warm=warm, timed=timed)
    found.replays.update({name: [t / times for t in ts] for name, ts in samples.items()})
    return found


def launch_times(
    device: Device,
    case: Case,
    contenders: Sequence[Contender],
    *,
    seconds: float,
    references: References,
) -> Measured:
    """Seconds of the host for one call of each, from the call to its return."""
    found, calls = admitted(case, contenders, device.where)
    calls |= references(case, case.positions(device.where))
    timed = device.host_timer()
    return replace(found, seconds=interleave(calls, seconds=seconds, warm=True, timed=timed))


def moved(case: Case, key: str) -> int:
    """Bytes of query and key that one call has to read and write.

    What is in place touches the slice that turns, what makes new tensors touches whole heads, and
    a backward pass does it again; that of a norm reads what came in beside the gradient. Positions,
    rows and tables are not counted.
    """
    in_place = key == MULTIPLY or ", in place" in key
    width = case.rotary_dim if in_place and case.rotary_dim else case.head_dim
    backward = 3 if key.startswith(NORMED) else 2
    passes = 2 + backward if case.backward else 2
    return passes * case.size * width // case.head_dim


def speed(m: Measured, key: str) -> float:
    """Bytes a second that the median round moved."""
    times = sorted(m.seconds[key])
    return moved(m.case, key) / times[len(times) // 2]


def excess(m: Measured, key: str) -> float:
    """Median time over that of a copy of as many bytes; 1 is the copy's bandwidth."""
    return m.ratio(key).median * moved(m.case, COPY) / moved(m.case, key)
