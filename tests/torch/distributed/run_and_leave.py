"""Run a script in float64, then end the process without Python's cleaning up.

What many processes add up in another order than one differs by roundings: in float64 they are too
small to hide anything else.

A thread of gloo that lets go of a tensor while Python finalizes aborts the process (torch 2.13).
That says nothing about the script, and on a busy machine happens once in some dozen runs.

torchrun --standalone --nproc-per-node 2 FOLDER/run_and_leave.py script.py arguments
"""

from __future__ import annotations

import os
import runpy
import sys

import torch

if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
