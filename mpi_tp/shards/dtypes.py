"""How torch dtypes are stored in HDF5: as HDF5's own number types, so that `h5dump` shows the values.

HDF5 2.0 predefines bfloat16 and the two 8-bit floats; built by hand here, they also work with older libraries. Their
values are never read or written through HDF5, which converts them in software at 0.03 GB/s: bytes go in and out raw.
"""

from collections.abc import Callable, Mapping
from functools import cache

import torch
from h5py import h5t


def _float_type(exponent_bits: int, mantissa_bits: int) -> h5t.TypeFloatID:
    """Return a little-endian float: sign, exponent and mantissa from the top, the bias half the exponent's range."""
    bits = 1 + exponent_bits + mantissa_bits
    stored: h5t.TypeFloatID = h5t.IEEE_F16LE.copy()
    stored.set_fields(bits - 1, mantissa_bits, exponent_bits, 0, mantissa_bits)
    stored.set_ebias(2 ** (exponent_bits - 1) - 1)
    stored.set_precision(bits)
    stored.set_size(bits // 8)
    return stored


_TYPES: Mapping[torch.dtype, Callable[[], h5t.TypeID]] = {
    torch.bfloat16: lambda: _float_type(8, 7),
    torch.float16: lambda: h5t.IEEE_F16LE,
    torch.float32: lambda: h5t.IEEE_F32LE,
    torch.float64: lambda: h5t.IEEE_F64LE,
    torch.float8_e4m3fn: lambda: _float_type(4, 3),
    torch.float8_e5m2: lambda: _float_type(5, 2),
    torch.int8: lambda: h5t.STD_I8LE,
    torch.uint8: lambda: h5t.STD_U8LE,
    torch.int16: lambda: h5t.STD_I16LE,
    torch.int32: lambda: h5t.STD_I32LE,
    torch.int64: lambda: h5t.STD_I64LE,
}

DTYPES = tuple(_TYPES)
"""Every dtype that a shard set can hold."""

_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in _TYPES}


@cache
def hdf5_type(dtype: torch.dtype) -> h5t.TypeID:
    """Return the HDF5 type that holds `dtype`."""
    return _TYPES[dtype]()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of that name; KeyError if a shard set cannot hold it."""
    return _BY_NAME[name]
