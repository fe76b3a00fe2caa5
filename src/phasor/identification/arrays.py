"""The arrays of other libraries, made from and read as NumPy's; each is imported when asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from phasor._checks import choice
from phasor.errors import BackendError

ARRAYS = ("numpy", "torch", "jax")
#: Largest relative error of rounding to a dtype.
ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


class Arrays(Protocol):
    """One library's arrays of one dtype."""

    name: str
    dtype: str

    def vectors(self, values: NDArray[Any]) -> Any:
        """Vectors in the dtype."""
        ...

    def positions(self, values: NDArray[Any]) -> Any:
        """Whole positions, in the widest integers the library has."""
        ...

    def read(self, value: Any) -> NDArray[np.float64]:
        """An array of the library as float64, copied."""
        ...

    def dtype_of(self, value: Any) -> str:
        """The dtype of an array of the library, by name."""
        ...

    def quietly(self, call: Callable[[], Any]) -> Any:
        """Call without recording for a backward pass."""
        ...


class _NumPy:
    name = "numpy"

    def __init__(self, dtype: str) -> None:
        if dtype == "bfloat16":
            raise BackendError('NumPy has no bfloat16; give arrays="torch" or "jax", or float32')
        self.dtype = dtype

    def vectors(self, values: NDArray[Any]) -> Any:
        return values.astype(self.dtype)

    def positions(self, values: NDArray[Any]) -> Any:
        return values.copy()

    def read(self, value: Any) -> NDArray[np.float64]:
        return np.array(value).astype(np.float64)

    def dtype_of(self, value: Any) -> str:
        dtype = np.asarray(value).dtype
        return "float64" if dtype == np.longdouble else str(dtype)

    def quietly(self, call: Callable[[], Any]) -> Any:
        with np.errstate(all="ignore"):
            return call()


class _Torch:
    name = "torch"

    def __init__(self, dtype: str) -> None:
        self._torch: Any = _imported("torch")
        self.dtype = dtype

    def vectors(self, values: NDArray[Any]) -> Any:
        return self._torch.from_numpy(values).to(getattr(self._torch, self.dtype))

    def positions(self, values: NDArray[Any]) -> Any:
        return self._torch.from_numpy(values.copy())

    def read(self, value: Any) -> NDArray[np.float64]:
        if not isinstance(value, self._torch.Tensor):
            return np.array(value).astype(np.float64)
        found: Any = value.detach()
        found = self._torch.view_as_real(found) if found.is_complex() else found
        return found.to("cpu", self._torch.float64, copy=True).numpy()

    def dtype_of(self, value: Any) -> str:
        return str(value.dtype).rpartition(".")[2]

    def quietly(self, call: Callable[[], Any]) -> Any:
        with self._torch.no_grad():
            return call()


class _Jax:
    name = "jax"

    def __init__(self, dtype: str) -> None:
        self._numpy: Any = _imported("jax").numpy
        self.dtype = dtype

    def vectors(self, values: NDArray[Any]) -> Any:
        return self._numpy.asarray(values, dtype=self.dtype)

    def positions(self, values: NDArray[Any]) -> Any:
        return self._numpy.asarray(values)

    def read(self, value: Any) -> NDArray[np.float64]:
        return np.array(value).astype(np.float64)

    def dtype_of(self, value: Any) -> str:
        return str(value.dtype)

    def quietly(self, call: Callable[[], Any]) -> Any:
        return call()


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        way_out = "pip install 'phasor[torch]'" if name == "torch" else f"pip install {name}"
        raise BackendError(
            f'arrays="{name}" needs {name}, which is not installed: {way_out}'
        ) from None


def holder(name: str, dtype: str) -> Arrays:
    """Arrays of the library ``name`` in ``dtype``.

    Raises:
        BackendError: If the library is not installed or lacks the dtype.
        SpecError: If the dtype is none of `ROUNDING`.
    """
    choice("dtype", dtype, ROUNDING)
    kinds: dict[str, Callable[[str], Arrays]] = {"numpy": _NumPy, "torch": _Torch, "jax": _Jax}
    return kinds[name](dtype)
