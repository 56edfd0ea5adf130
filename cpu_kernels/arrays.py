"""Arrays of any origin, as an address with shape, strides and element type."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cpu_kernels import _native

#: Element types by name: the code that C++ uses and the size in bytes.
DTYPES = {"float32": (0, 4), "float16": (1, 2), "bfloat16": (2, 2), "int8": (3, 1)}
_FORMATS = {"f": "float32", "e": "float16", "b": "int8", "h": "int16", "H": "uint16", "B": "uint8"}


def dtype_name(dtype: Any) -> str:
    """The name of an element type given as a name or as an object that prints as one (``torch.bfloat16``).

    Raises ValueError if it is none of float32, float16, bfloat16, int8.
    """
    name = getattr(dtype, "__name__", None) or str(dtype)
    name = name.rsplit(".", 1)[-1]
    if name not in DTYPES:
        raise ValueError(f"unknown element type {dtype!r}; known: {', '.join(DTYPES)}")
    return name


@dataclass(frozen=True)
class Array:
    """Memory seen as an array; ``owner`` keeps it alive."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    dtype: str
    itemsize: int
    owner: Any = None


def as_array(data: Any, writable: bool = False) -> Array:
    """``data`` as an Array.

    Args:
        data: an Array; anything with the buffer protocol; anything with ``data_ptr()``, ``shape``, ``stride()`` and
            ``dtype``, such as a CPU tensor; or a tuple (address, shape, strides in bytes or None, element type).
        writable: refuse read-only buffers.

    Raises:
        TypeError: ``data`` is none of these, or not in host memory.
        BufferError, ValueError: a read-only buffer that must be writable.
    """
    if isinstance(data, Array):
        return data
    if isinstance(data, tuple):
        address, shape, strides, dtype = data
        name = dtype_name(dtype)
        itemsize = DTYPES[name][1]
        if strides is None:
            strides = _contiguous(tuple(shape), itemsize)
        return Array(int(address), tuple(map(int, shape)), tuple(map(int, strides)), name, itemsize)
    if hasattr(data, "data_ptr"):
        device = str(getattr(data, "device", "cpu"))
        if not device.startswith("cpu"):
            raise TypeError(f"an array in host memory is needed, got one on {device}")
        itemsize = data.element_size()
        name = str(data.dtype).rsplit(".", 1)[-1]
        strides = tuple(s * itemsize for s in data.stride())
        return Array(data.data_ptr(), tuple(data.shape), strides, name, itemsize, data)
    address, shape, strides, code, itemsize = _native.buffer_info(data, writable)
    return Array(address, shape, strides, _FORMATS.get(code.lstrip("@=<"), code), itemsize, data)


def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * int(n))
    return tuple(strides)


def check(
    data: Any, name: str, shape: Sequence[int | None], dtype: str, inner: int = 1, writable: bool = False
) -> Array:
    """``data`` as an Array that fits.

    Args:
        data: see as_array. 16-bit integers pass for either 16-bit float type, because the buffer protocol knows no
            bfloat16.
        name: of the argument, for messages.
        shape: the size each dimension must have, None for any.
        dtype: the element type it must have.
        inner: how many of the last dimensions must be contiguous.
        writable: refuse read-only buffers.

    Raises:
        TypeError, ValueError: what does not fit, by name.
    """
    array_ = as_array(data, writable)
    if array_.dtype != dtype and not (array_.dtype in ("uint16", "int16") and DTYPES[dtype][1] == 2):
        raise ValueError(f"{name}: elements must be {dtype}, got {array_.dtype}")
    if len(array_.shape) != len(shape) or any(
        want is not None and want != got for want, got in zip(shape, array_.shape, strict=True)
    ):
        wanted = "x".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{name}: shape must be {wanted}, got {'x'.join(map(str, array_.shape))}")
    expected = array_.itemsize
    for i in range(len(shape) - 1, len(shape) - 1 - inner, -1):
        if array_.shape[i] > 1 and array_.strides[i] != expected:
            raise ValueError(
                f"{name}: the last {inner} dimension(s) must be contiguous, strides are {array_.strides} bytes"
            )
        expected *= array_.shape[i]
    if 0 in array_.shape:
        return array_
    if array_.address == 0:
        raise ValueError(f"{name}: null address")
    if array_.address % array_.itemsize or any(s % array_.itemsize for s in array_.strides):
        raise ValueError(f"{name}: address and strides must be multiples of the element size")
    return array_


def int32s(data: Any, name: str) -> Any:
    """A C-contiguous one-dimensional int32 buffer with the integers of ``data`` (itself, if it is one already)."""
    return _integers(data, name, "i", 4)


def int64s(data: Any, name: str) -> Any:
    """The same with int64."""
    return _integers(data, name, "q", 8)


def _integers(data: Any, name: str, code: str, itemsize: int) -> Any:
    if hasattr(data, "data_ptr") and hasattr(data, "numpy"):
        data = data.numpy()
    try:
        view = memoryview(data)
    except TypeError:
        view = None
    if view is not None:
        if view.ndim != 1 or view.format not in ("i", "l", "q", "I", "L", "Q", "h", "H", "b", "B"):
            raise ValueError(f"{name}: a one-dimensional array of integers is needed")
        same = view.itemsize == itemsize and view.format in ("i", "l", "q")
        if same and view.c_contiguous:
            return data
        data = view.tolist()
    try:
        return array(code, data)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{name}: integers are needed ({error})") from error
