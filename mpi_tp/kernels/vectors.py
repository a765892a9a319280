"""Registers of LANES numbers as a type of numba, so that a kernel can say what lies side by side.

A compiler that is free to choose sums a row in another order for another length. Here the source has the order, and an
element has the same bits in a vector and alone: `+ - * /`, `fma`, `larger` and `smaller` take vectors and float32
alike, a float32 beside a vector standing for a vector of it.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, overload, register_model

from mpi_tp.kernels.jit import intrinsic

LANES = 16
"""Numbers side by side: one register of AVX-512, two of AVX2."""

FLOAT, DOUBLE, INT = ir.FloatType(), ir.DoubleType(), ir.IntType(32)
VECTOR = ir.VectorType(FLOAT, LANES)


class Vector(types.Type):
    """LANES numbers of one type."""

    def __init__(self, element: types.Type) -> None:
        self.element = element
        super().__init__(name=f"Vector({element})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, ir.VectorType(manager[kind.element].get_value_type(), LANES))


FLOATS, DOUBLES = Vector(types.float32), Vector(types.float64)

Emit = Callable[[ir.IRBuilder, Sequence[ir.Value]], ir.Value]


def broadcast(builder: ir.IRBuilder, number: ir.Value) -> ir.Value:
    """Emit a vector of one number."""
    undefined = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, number, INT(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(INT, LANES), [0] * LANES))


def call_llvm(builder: ir.IRBuilder, name: str, operands: Sequence[ir.Value]) -> ir.Value:
    """Emit a call of an LLVM function on numbers or vectors of one type, which it also returns."""
    kind = operands[0].type
    lanes, element = (f"v{LANES}", kind.element) if isinstance(kind, ir.VectorType) else ("", kind)
    full_name = f"llvm.{name}.{lanes}{'f32' if element == FLOAT else 'f64'}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * len(operands)), full_name)
    return builder.call(function, operands)


def elementwise(kinds: Sequence[types.Type], emit: Emit) -> tuple[Any, Callable[..., ir.Value]]:
    """Return what an intrinsic on numbers and vectors returns; numbers beside a vector are broadcast."""
    common = next((kind for kind in kinds if isinstance(kind, Vector)), kinds[0])

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        pairs = zip(kinds, args, strict=True)
        return emit(builder, [value if kind == common else broadcast(builder, value) for kind, value in pairs])

    return common(*kinds), generate


@intrinsic
def fma(_typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""
    return elementwise((a, b, c), lambda builder, operands: call_llvm(builder, "fma", operands))


@intrinsic
def larger(_typing: Any, a: Any, b: Any) -> Any:
    """Return b where it is the larger, otherwise a: what is no number (NaN) is kept in a and passed over in b."""
    return elementwise((a, b), lambda builder, ab: builder.select(builder.fcmp_ordered("<", *ab), ab[1], ab[0]))


@intrinsic
def smaller(_typing: Any, a: Any, b: Any) -> Any:
    """Return b where it is the smaller, otherwise a: what is no number (NaN) is kept in a and passed over in b."""
    return elementwise((a, b), lambda builder, ab: builder.select(builder.fcmp_ordered(">", *ab), ab[1], ab[0]))


@intrinsic
def maximum(_typing: Any, a: Any, b: Any) -> Any:
    """Return the larger of a and b, NaN if either is."""
    return elementwise((a, b), lambda builder, operands: call_llvm(builder, "maximum", operands))


def _declare(operation: Callable[..., Any], instruction: str) -> None:
    """Let numba's operator take vectors."""

    @intrinsic
    def apply(_typing: Any, a: Any, b: Any) -> Any:
        return elementwise((a, b), lambda builder, operands: getattr(builder, instruction)(*operands))

    @overload(operation, strict=False)
    def _on_vectors(a: Any, b: Any) -> Any:
        if isinstance(a, Vector) or isinstance(b, Vector):
            return lambda a, b: apply(a, b)
        return None


for _operation, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _declare(_operation, _instruction)


@intrinsic
def fill(_typing: Any, number: Any) -> Any:
    """Return a vector of one float32 or float64."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> ir.Value:
        return broadcast(builder, args[0])

    return Vector(number)(number), generate


@intrinsic
def load(_typing: Any, array: Any, index: Any) -> Any:
    """Return elements index … index + LANES - 1 of a dense float32 array [N]. No bounds are checked."""

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> ir.Value:
        return builder.load(_place(context, builder, array, args), align=4)

    return FLOATS(array, types.intp), generate


@intrinsic
def store(_typing: Any, array: Any, index: Any, vector: Any) -> Any:
    """Write a vector to elements index … index + LANES - 1 of a dense float32 array [N]. No bounds are checked."""

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> ir.Value:
        builder.store(args[2], _place(context, builder, array, args), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), generate


def _place(context: Any, builder: ir.IRBuilder, array: Any, args: Any) -> ir.Value:
    data = context.make_array(array)(context, builder, args[0]).data
    return builder.bitcast(builder.gep(data, [args[1]]), VECTOR.as_pointer())


@intrinsic
def widen(_typing: Any, vector: Any) -> Any:
    """Return a vector of float32 as float64."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> ir.Value:
        return builder.fpext(args[0], ir.VectorType(DOUBLE, LANES))

    return DOUBLES(vector), generate


@intrinsic
def lane(_typing: Any, vector: Any, number: Any) -> Any:
    """Return one number of a vector."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> ir.Value:
        return builder.extract_element(*args)

    return vector.element(vector, types.intp), generate


@intrinsic
def float_of_bits(_typing: Any, bits: Any) -> Any:
    """Return the float32 that these 32 bits spell."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> ir.Value:
        return builder.bitcast(args[0], FLOAT)

    return types.float32(types.int32), generate


@intrinsic
def times_power(_typing: Any, x: Any, shifted: Any) -> Any:
    """Return x * 2^n, where n stands in the low bits of `shifted`: n + 1.5 * 2^23 as float32, -252 <= n <= 254.

    The power goes in by halves: as a whole it leaves the range of float32 where the result is still inside.
    """

    def emit(builder: ir.IRBuilder, operands: Sequence[ir.Value]) -> ir.Value:
        kind = operands[0].type
        words = ir.VectorType(INT, LANES) if isinstance(kind, ir.VectorType) else INT

        def constant(number: int) -> ir.Constant:
            return ir.Constant(words, [number] * LANES if words != INT else number)

        power = builder.sub(builder.bitcast(operands[1], words), constant(0x4B400000))
        half = builder.ashr(power, constant(1))
        result = operands[0]
        for part in (half, builder.sub(power, half)):
            factor = builder.shl(builder.add(part, constant(127)), constant(23))
            result = builder.fmul(result, builder.bitcast(factor, kind))
        return result

    return elementwise((x, shifted), emit)
