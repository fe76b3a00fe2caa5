"""Fixtures that several files of kernels ask for."""

from .triton_compiler import compiler, compiler_of_rows, hopper
from .triton_runs import small_tensors

__all__ = ["compiler", "compiler_of_rows", "hopper", "small_tensors"]
