"""A matrix product held in registers, written in LLVM's language: the loop that nearly all time goes to.

It uses LLVM's own `fma`, which rounds once and is never reordered or left out.
"""

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from mpi_tp.kernels.jit import intrinsic
from mpi_tp.kernels.vectors import FLOAT, INT, LANES, VECTOR, broadcast, call_llvm

MAX_ROWS = 6
"""Rows of one tile whose sums, beside the operands, fit the 16 registers of AVX2."""

BLOCKINGS = ((1, 1, 4, (1,)), (2, 2, 2, (2,)), (3, 2**62, 1, (6, 5, 4, 3)))
"""Fewest rows, most rows, tiles side by side, rows in a block.

Few rows need more tiles to keep the multipliers and the memory busy. From three rows on, blocks as equal as can be
have three rows or more.
"""

STREAM_BYTES = 2048
"""How far ahead of its use a weight is fetched where one row makes each tile a stream of its own."""

WORDS = ir.VectorType(INT, LANES)
HALVES = ir.VectorType(ir.IntType(16), LANES)


@intrinsic
def add_product(_typing: Any, x: Any, w: Any, y: Any) -> Any:
    """Add x · wᵀ to y: each sum over k runs in order from zero, in a register, and is then added.

    x [M, K] float32    w [N / LANES, K, LANES] float32 or bfloat16 (as uint16), tiles of which follow one another
    y [M, N] float32, N a multiple of LANES; the last axis of each array is dense

    No bounds are checked.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        x, w, y = (_View.of(context, builder, kind, value) for kind, value in zip(signature.args, args, strict=True))
        _Product(builder, x, w, y, ahead=None).emit()
        return context.get_dummy_value()

    return types.void(x, w, y), generate


@intrinsic
def carry_product(_typing: Any, x: Any, w: Any, y: Any, ahead: Any) -> Any:
    """Go on with sums in y by those over x · w, in the order of k and in a register.

    x [M, K], w [K, N], y [M, N] float32, N a multiple of LANES; the last axis of each array is dense. Meanwhile the
    processor fetches `ahead`, the array that will stand for w later, with the strides of w and no fewer rows.

    No bounds are checked.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        views = (_View.of(context, builder, kind, value) for kind, value in zip(signature.args, args, strict=True))
        _Product(builder, *views).emit()
        return context.get_dummy_value()

    return types.void(x, w, y, ahead), generate


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
class _Product:
    """Writes the code of a product: blocks of rows and tiles, each a loop over k with a grid of vector sums.

    With `ahead` it is `carry_product`, otherwise `add_product`.
    """

    builder: ir.IRBuilder
    x: _View
    w: _View
    y: _View
    ahead: _View | None

    def emit(self) -> None:
        builder, rows = self.builder, self.x.shape[0]
        for fewest, most, tiles, sizes in BLOCKINGS:
            at_least, at_most = (builder.icmp_signed(c, rows, rows.type(n)) for c, n in ((">=", fewest), ("<=", most)))
            with builder.if_then(builder.and_(at_least, at_most)):
                self._emit_tiles(tiles, sizes)

    def _emit_tiles(self, tiles: int, row_sizes: tuple[int, ...]) -> None:
        """Go over the columns, `tiles` tiles at a time, then the tiles left one by one."""
        builder = self.builder
        total = builder.udiv(self.y.shape[1], self.y.shape[1].type(LANES))
        first = total.type(0)
        for group in sorted({tiles, 1}, reverse=True):
            step = total.type(group)
            end = builder.sub(total, builder.urem(total, step))
            with cgutils.for_range_slice(builder, first, end, step) as (tile, _count):
                self._emit_rows([builder.add(tile, total.type(t)) for t in range(group)], row_sizes)
            first = end

    def _emit_rows(self, tiles: list[ir.Value], sizes: tuple[int, ...]) -> None:
        """Go over the rows in blocks of almost equal size, none larger than MAX_ROWS."""
        builder, total = self.builder, self.x.shape[0]
        index = total.type
        blocks = builder.udiv(builder.add(total, index(MAX_ROWS - 1)), index(MAX_ROWS))
        small, larger_blocks = builder.udiv(total, blocks), builder.urem(total, blocks)
        first = index(0)
        for size in sizes:
            is_small, is_large = (builder.icmp_signed("==", small, index(size - more)) for more in (0, 1))
            count = builder.select(is_small, builder.sub(blocks, larger_blocks), index(0))
            count = builder.select(is_large, larger_blocks, count)
            end = builder.add(first, builder.mul(count, index(size)))
            with cgutils.for_range_slice(builder, first, end, index(size)) as (row, _count):
                self._emit_block([builder.add(row, index(m)) for m in range(size)], tiles)
            first = end

    def _emit_block(self, rows: list[ir.Value], tiles: list[ir.Value]) -> None:
        builder = self.builder
        x_rows, w_tiles = [self.x.row(row) for row in rows], [self._weights(self.w, tile) for tile in tiles]
        targets = {(m, t): self._target(row, tile) for m, row in enumerate(rows) for t, tile in enumerate(tiles)}
        sums = {cell: cgutils.alloca_once(builder, VECTOR) for cell in targets}
        for cell, target in targets.items():
            builder.store(self._load(target) if self.ahead else ir.Constant(VECTOR, [0.0] * LANES), sums[cell])
        fetches = self._fetches(rows, tiles)
        with cgutils.for_range(builder, self.x.shape[1]) as loop:
            for address, step in fetches:
                _emit_prefetch(builder, cgutils.pointer_add(builder, address, builder.mul(loop.index, step)))
            weights = [self._weight(tile, loop.index) for tile in w_tiles]
            for m, x_row in enumerate(x_rows):
                number = broadcast(builder, builder.load(builder.gep(x_row, [loop.index])))
                for t, weight in enumerate(weights):
                    total = call_llvm(builder, "fma", (number, weight, builder.load(sums[m, t])))
                    builder.store(total, sums[m, t])
        for cell, target in targets.items():
            part = builder.load(sums[cell])
            builder.store(part if self.ahead else builder.fadd(self._load(target), part), target, align=4)

    def _target(self, row: ir.Value, tile: ir.Value) -> ir.Value:
        """Return the address of a vector of y."""
        column = self.builder.mul(tile, tile.type(LANES))
        return self.builder.bitcast(self.builder.gep(self.y.row(row), [column]), VECTOR.as_pointer())

    def _weights(self, w: _View, tile: ir.Value) -> ir.Value:
        """Return the address of a tile's weights at k = 0."""
        if len(w.shape) == 3:
            return w.row(tile)
        return self.builder.gep(w.data, [self.builder.mul(tile, tile.type(LANES))])

    def _fetches(self, rows: list[ir.Value], tiles: list[ir.Value]) -> list[tuple[ir.Value, ir.Value]]:
        """Return where a block of rows starts to fetch weights ahead of their use, and how far it moves with each k."""
        if self.ahead:
            return [(self._weights(self.ahead, tile), self.ahead.strides[0]) for tile in tiles]
        if len(rows) == 1:
            stride = self.w.strides[1]
            return [
                (cgutils.pointer_add(self.builder, self.w.row(t), stride.type(STREAM_BYTES)), stride) for t in tiles
            ]
        return [self._share_of_next(tile, len(tiles), rows) for tile in tiles]

    def _share_of_next(self, tile: ir.Value, distance: int, rows: list[ir.Value]) -> tuple[ir.Value, ir.Value]:
        """Return how a block of rows fetches its share of the tile `distance` on, so that memory is busy all the time.

        Fetching past the end does no harm.
        """
        builder, total = self.builder, self.x.shape[0]
        stride = self.w.strides[1]
        step = builder.udiv(builder.mul(stride, stride.type(len(rows))), total)
        done = builder.udiv(builder.mul(builder.mul(self.x.shape[1], stride), rows[0]), total)
        start = builder.mul(self.w.strides[0], stride.type(distance))
        return cgutils.pointer_add(builder, self.w.row(tile), builder.add(start, done)), step

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


def _emit_prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    signature = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), INT, INT, INT])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    read, keep_close, data = INT(0), INT(3), INT(1)
    builder.call(function, [builder.bitcast(address, signature.args[0]), read, keep_close, data])
