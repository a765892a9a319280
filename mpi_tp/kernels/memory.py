"""The arguments of a kernel as numba's arrays.

Such an array owns nothing, so that a slice of it counts no references, and inner loops slice a lot.
"""

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types

from mpi_tp.kernels.jit import inlined, intrinsic


def _array_of(element: types.Type) -> Callable[..., Any]:
    """Return what makes a dense array of such elements from an address and a shape."""

    @intrinsic
    def pointer(_typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(address), generate

    @inlined
    def array(address: int, shape: tuple[int, ...]) -> Any:
        return numba.carray(pointer(address), shape)

    return array


floats = _array_of(types.float32)
bfloats = _array_of(types.uint16)
"""bfloat16 has no type in numba: its bits."""
ints = _array_of(types.int64)
short_ints = _array_of(types.int32)
