"""How kernels are compiled: at the first call, for this CPU, and kept on disk for the next process."""

import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding


def _cache_folder() -> Path:
    """Return the folder for this version of these sources on this kind of CPU.

    numba itself notices neither a change in a file that a kernel calls into, nor two kinds of CPU that share a home.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    facts = [path.read_bytes() for path in sources]
    machine = llvmlite.binding.get_host_cpu_name(), llvmlite.binding.get_host_cpu_features().flatten()
    facts += [part.encode() for part in (llvmlite.__version__, *machine)]
    root = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if not root.is_absolute():
        # A user without a home, as in some containers.
        root = Path(__file__).parent / "__pycache__"
    return root / "mpi-tp" / f"kernels-{hashlib.sha256(b''.join(facts)).hexdigest()[:16]}"


# Vector math libraries compute the last elements of a row by other code than the rest. numba reads this at import.
os.environ["NUMBA_DISABLE_INTEL_SVML"] = "1"

import numba  # noqa: E402
import numba.core.config  # noqa: E402
import numba.extending  # noqa: E402

numba.core.config.CACHE_DIR = str(_cache_folder())  # type: ignore[attr-defined]  # made at run time

intrinsic: Callable[[Callable[..., Any]], Any] = numba.extending.intrinsic(prefer_literal=True)
"""Decorator of a function that writes LLVM code; integers written out in a call reach it as literals."""

inlined: Callable[[Callable[..., Any]], Any] = numba.njit(inline="always")
"""Decorator of a function that becomes part of the kernels that call it, with no compilation of its own."""


Address = int
"""Annotates an argument of a kernel that is the address of a contiguous tensor's memory."""


def kernel(function: Callable[..., None]) -> Callable[..., None]:
    """Compile a function of addresses, ints and floats at its first call; with no folder to write to, for this process.

    Who calls it keeps the tensors alive, and answers for their types and sizes. An array of numpy would know those, and
    costs as much to make as a small operation takes.

    Multiplications and additions are fused only where the source says so (`vectors.fma`), and never reordered.
    """
    kinds = [kind for name, kind in function.__annotations__.items() if name != "return"]
    signature = numba.void(*(numba.float64 if kind is float else numba.int64 for kind in kinds))

    @functools.cache
    def compiled() -> Any:
        try:
            return numba.njit([signature], cache=True, nogil=True, error_model="numpy")(function)
        except (RuntimeError, OSError):
            # numba found no folder to write to, or no room in it.
            return numba.njit([signature], nogil=True, error_model="numpy")(function)

    @functools.wraps(function)
    def call(*arguments: float) -> None:
        compiled()(*arguments)

    return call
