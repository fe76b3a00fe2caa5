"""A GPU for pytest, without one: ``python -m pytest -p tests.ptx.device tests/gpu/test_triton.py``.

Triton compiles as it would for a GPU of compute capability `CAPABILITY`, and launches with its own
launcher, through a libcuda that hands everything to `machine`. Tensors stay on the CPU.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.nvidia import driver as nvidia

from .machine import launch
from .program import Program, read

CAPABILITY = int(os.environ.get("PTX_CAPABILITY", "90"))
#: What every launch moved: `machine.launch`. The latest is the last.
LAUNCHES: list[Counter[tuple[str, int]]] = []


class Driver(nvidia.CudaDriver):
    """Triton's, of one device that torch knows nothing of."""

    def __init__(self, library: ctypes.CDLL) -> None:
        # not what it does by itself: ask torch
        self.utils = nvidia.CudaUtils()
        self.launcher_cls = lambda *made: Launcher(self, *made)
        self.get_device_capability = lambda device: divmod(CAPABILITY, 10)
        self.get_current_stream = lambda device: 0
        self.get_current_device = lambda: 0
        self.programs: dict[int, Program] = {}
        self.tensors: list[tuple[int, int]] = []
        self.fault: Exception | None = None
        pointers = ctypes.POINTER(ctypes.c_void_p)
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_ulonglong, *[ctypes.c_uint] * 3, pointers)
        # kept, for the library calls it
        self.callback = kind(self.launched)
        library.on_launch(self.callback)

    def loaded(self, _: Any, function: int, name: str, files: dict[str, str], __: str) -> None:
        """Triton has compiled a kernel, or found it."""
        self.programs[function] = read(Path(files[f"{name}.ptx"]).read_text())

    def launched(self, function: int, count: int, threads: int, shared: int, given: Any) -> int:
        """The library's ``cuLaunchKernelEx``: 0 if all went well."""
        try:
            program = self.programs[function]
            assert threads == program.threads
            arguments = bytearray()
            for i, (place, size) in enumerate(program.parameters.values()):
                arguments += bytes(place - len(arguments)) + ctypes.string_at(given[i], size)
            LAUNCHES.append(launch(program, count, shared, bytes(arguments), self.tensors))
        except Exception as fault:
            self.fault = fault
            return 1
        return 0


class Launcher(nvidia.CudaLauncher):
    """Triton's, which notes where tensors end."""

    def __init__(self, driver: Driver, *made: Any) -> None:
        super().__init__(*made)
        self.driver = driver

    def __call__(self, *given: Any) -> None:
        stores = [x.untyped_storage() for x in given if hasattr(x, "untyped_storage")]
        self.driver.tensors = [(store.data_ptr(), store.nbytes()) for store in stores]
        self.driver.fault = None
        try:
            super().__call__(*given)
        except RuntimeError:
            if self.driver.fault is not None:
                raise self.driver.fault from None
            raise


def pytest_configure(config: pytest.Config) -> None:
    """Make it the device of this process, for good."""
    assert os.environ.get("TRITON_INTERPRET") != "1", "what is interpreted is not compiled"
    # Triton's own module is linked with it, here and whenever else
    folder = Path(tempfile.mkdtemp(prefix="libcuda-"))
    config.add_cleanup(lambda: shutil.rmtree(folder))
    library = folder / "libcuda.so.1"
    headers = Path(nvidia.__file__).with_name("include")
    flags = ["-shared", "-fPIC", "-Wall", "-Werror", "-Wl,-soname,libcuda.so.1", f"-I{headers}"]
    subprocess.run(
        ["gcc", *flags, str(Path(__file__).with_name("libcuda.c")), "-o", str(library)], check=True
    )
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    driver = Driver(ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL))
    triton.runtime.driver.set_active(driver)
    triton.knobs.runtime.kernel_load_end_hook.add(driver.loaded)
    import_module("phasor.torch._operator.triton.kernels")
    # it is too late for Triton to interpret, but phasor now takes tensors on the CPU for its own
    os.environ["TRITON_INTERPRET"] = "1"
