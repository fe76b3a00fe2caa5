"""Fixtures that several files of kernels ask for."""

from .triton_compiler import compiler, hopper
from .triton_runs import small_tensors

__all__ = ["compiler", "hopper", "small_tensors"]
