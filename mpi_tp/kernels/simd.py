"""The building blocks that numba has no word for: a fused multiply-add, and a matrix product held in registers.

Both write LLVM's own `fma`, which rounds once and is never reordered or left out. So an element has the same bits
whether the compiler puts it in a vector or in the scalar loop over the rest.
"""

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from mpi_tp.kernels.jit import intrinsic

LANES = 16
"""Columns computed side by side: one register of AVX-512, two of AVX2."""

MAX_SUMS = 6
"""Vector sums that fit the registers of AVX2 beside the operands."""

ROW_BLOCKS = (6, 4, 3, 2, 1)

FLOAT = ir.FloatType()
INT = ir.IntType(32)
VECTOR = ir.VectorType(FLOAT, LANES)
WORDS = ir.VectorType(INT, LANES)
HALVES = ir.VectorType(ir.IntType(16), LANES)


def _emit_fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    name = "llvm.fma.f32" if a.type == FLOAT else f"llvm.fma.v{LANES}f32"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name)
    return builder.call(function, [a, b, c])


@intrinsic
def fma(_typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c in float32, rounded once."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> ir.Value:
        return _emit_fma(builder, *args)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def float_of_bits(_typing: Any, bits: Any) -> Any:
    """Return the float32 that these 32 bits spell."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> ir.Value:
        return builder.bitcast(args[0], FLOAT)

    return types.float32(types.int32), generate


@intrinsic
def bits_of_float(_typing: Any, number: Any) -> Any:
    """Return the 32 bits of a float32 as an int32."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> ir.Value:
        return builder.bitcast(args[0], INT)

    return types.int32(types.float32), generate


@intrinsic
def tile_product(_typing: Any, tiles: Any, carry: Any, x: Any, w: Any, y: Any) -> Any:
    """Add x · w to y for all rows of x, with every sum in a register and in the order of k.

    x [M, K] float32    y [M, tiles * LANES or more] float32
    w [tiles or more, K, LANES] or [K, tiles * LANES or more] float32 or bfloat16 (as uint16)
    The last axis of each array is dense; the others may have gaps. No bounds are checked.

    With `carry` 1 a sum goes on from y; with 0 it starts from zero and is added to y at the end. `tiles`, 1 to 6, and
    `carry` are literals.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        views = (_View.of(context, builder, signature.args[i], args[i]) for i in range(2, len(args)))
        _TileProduct(builder, tiles.literal_value, bool(carry.literal_value), *views).emit()
        return context.get_dummy_value()

    return types.void(tiles, carry, x, w, y), generate


@dataclass(frozen=True)
class _View:
    """An array argument inside generated code: address, shape, strides in bytes."""

    builder: ir.IRBuilder
    data: ir.Value
    shape: list[ir.Value]
    strides: list[ir.Value]

    @classmethod
    def of(cls, context: Any, builder: ir.IRBuilder, array_type: Any, value: ir.Value) -> "_View":
        array = context.make_array(array_type)(context, builder, value)
        shape, strides = (cgutils.unpack_tuple(builder, part) for part in (array.shape, array.strides))
        return cls(builder, array.data, shape, strides)

    def row(self, number: ir.Value) -> ir.Value:
        """Return the address of row `number` of the first axis."""
        return cgutils.pointer_add(self.builder, self.data, self.builder.mul(self.strides[0], number))


@dataclass(frozen=True)
class _TileProduct:
    """Writes the code of `tile_product`: blocks of rows, each a loop over k with a grid of vector accumulators."""

    builder: ir.IRBuilder
    tiles: int
    carry: bool
    x: _View
    w: _View
    y: _View

    def emit(self) -> None:
        """Cut the rows into blocks as large as the registers allow, and what is left into smaller ones."""
        builder, total = self.builder, self.x.shape[0]
        first = total.type(0)
        for rows in ROW_BLOCKS:
            if rows * self.tiles > MAX_SUMS and rows > 1:
                continue
            step = total.type(rows)
            end = builder.sub(total, builder.urem(builder.sub(total, first), step))
            with cgutils.for_range_slice(builder, first, end, step) as (row, _count):
                self._emit_block([builder.add(row, total.type(m)) for m in range(rows)])
            first = end

    def _emit_block(self, rows: list[ir.Value]) -> None:
        builder = self.builder
        x_rows, w_tiles, targets = self._addresses(rows)
        sums = {cell: cgutils.alloca_once(builder, VECTOR) for cell in targets}
        for cell, target in targets.items():
            builder.store(self._load(target) if self.carry else ir.Constant(VECTOR, [0.0] * LANES), sums[cell])
        with cgutils.for_range(builder, self.x.shape[1]) as loop:
            weights = [self._weight(tile, loop.index) for tile in w_tiles]
            for m, x_row in enumerate(x_rows):
                number = _broadcast(builder, builder.load(builder.gep(x_row, [loop.index])))
                for t, weight in enumerate(weights):
                    builder.store(_emit_fma(builder, number, weight, builder.load(sums[m, t])), sums[m, t])
        for cell, target in targets.items():
            part = builder.load(sums[cell])
            builder.store(part if self.carry else builder.fadd(self._load(target), part), target, align=4)

    def _addresses(
        self, rows: list[ir.Value]
    ) -> tuple[list[ir.Value], list[ir.Value], dict[tuple[int, int], ir.Value]]:
        """Return where the rows of x and the tiles of w begin, and the vectors of y by row and tile."""
        builder, index = self.builder, ir.IntType(64)
        if len(self.w.shape) == 2:
            tiles = [builder.gep(self.w.data, [index(tile * LANES)]) for tile in range(self.tiles)]
        else:
            tiles = [self.w.row(index(tile)) for tile in range(self.tiles)]
        targets = {}
        for m, row in enumerate(rows):
            for t in range(self.tiles):
                output = builder.gep(self.y.row(row), [index(t * LANES)])
                targets[m, t] = builder.bitcast(output, VECTOR.as_pointer())
        return [self.x.row(row) for row in rows], tiles, targets

    def _load(self, address: ir.Value) -> ir.Value:
        return self.builder.load(address, align=4)

    def _weight(self, tile: ir.Value, k: ir.Value) -> ir.Value:
        """Load the LANES weights of one k as float32."""
        builder = self.builder
        address = cgutils.pointer_add(builder, tile, builder.mul(k, self.w.strides[-2]))
        if tile.type == FLOAT.as_pointer():
            return self._load(builder.bitcast(address, VECTOR.as_pointer()))
        halves = builder.load(builder.bitcast(address, HALVES.as_pointer()), align=2)
        words = builder.shl(builder.zext(halves, WORDS), ir.Constant(WORDS, [16] * LANES))
        return builder.bitcast(words, VECTOR)


def _broadcast(builder: ir.IRBuilder, number: ir.Value) -> ir.Value:
    undefined = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, number, INT(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(WORDS, [0] * LANES))
