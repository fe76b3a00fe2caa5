"""Run scripts on several processes, forked from one that has imported for all what they import.

What many processes add up in another order than one differs by roundings: in float64, torch's
default here, they are too small to hide anything else.

A thread of gloo that lets go of a tensor while Python finalizes aborts the process (torch 2.13).
That says nothing about the script, and on a busy machine happens once in some dozen runs: a process
ends here without Python's cleaning up. So does the one that torchrun starts:

torchrun --standalone --nproc-per-node 2 FOLDER/forked.py script.py arguments
python FOLDER/forked.py '[[2, ["script.py", "arguments"]], [4, ["script.py"]]]'
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import tempfile
from pathlib import Path

import torch

# what scripts under torchrun import, some of it late; it takes longer than they do
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel

import phasor.torch.distributed  # noqa: F401


def run_and_leave(arguments: list[str]) -> None:
    """Run a script to its end, then end the process at once."""
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def printed(processes: int, arguments: list[str]) -> str:
    """What a script prints on so many processes; on 0 it is run as without torchrun."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(probe.getsockname()[1])}
    with tempfile.TemporaryFile("w+") as out:
        running = set()
        for rank in range(max(processes, 1)):
            child = os.fork()
            if child:
                running.add(child)
                continue
            try:
                os.dup2(out.fileno(), 1)
                if processes:
                    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes}
                    os.environ.update(where | {name: str(n) for name, n in ranks.items()})
                run_and_leave(arguments)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            os._exit(1)
        while running:
            child, status = os.wait()
            running.remove(child)
            if status:
                for other in running:
                    os.kill(other, 9)
                sys.exit(f"{arguments} on {processes} processes ended with {status}")
        out.seek(0)
        return out.read()


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    if Path(sys.argv[1]).suffix == ".py":
        run_and_leave(sys.argv[1:])
    print(json.dumps([printed(*case) for case in json.loads(sys.argv[1])]))
