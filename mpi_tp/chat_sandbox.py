"""Jinja's sandbox with bounds: a template that never ends, or grows a text without end, fails instead.

It runs for every conversation of a batch, which one such template would stop. Bounded are the turns of its loops and
its calls, the text that it writes, and what its operators make; what a filter makes of sound numbers is not.
"""

import re
from functools import reduce
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000
"""Turns of loops, and calls; a conversation of a thousand messages takes some ten thousand."""
MAX_LENGTH = 64 << 20
"""Characters of the prompt and of any text in between, items of a list; no context is as long."""
MAX_NUMBER = 1_000_000
"""Of a number that is written in a template, computed in it or given to a function."""

_WIDE = re.compile(r"[0-9]{6,}|\*")


def step() -> str:
    """Is called in every turn of a loop and in every macro, so that these count as calls do."""
    return ""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates for `run`, one at a time."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    _steps = 0

    def run(self, template: jinja2.Template, **variables: Any) -> str:
        """Return what the template writes. Raises SecurityError beyond a bound, else what the template raises."""
        self._steps = 0
        pieces: list[str] = []
        length = 0
        for piece in template.generate(**variables):
            length += len(piece)
            _check(length <= MAX_LENGTH)
            pieces.append(piece)
        return "".join(pieces)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function after counting it and looking at the numbers that it gets."""
        __self._steps += 1
        _check(__self._steps <= MAX_STEPS)
        _check(all(abs(value) <= MAX_NUMBER for value in (*args, *kwargs.values()) if isinstance(value, int)))
        if getattr(__obj, "__name__", "") == "format":
            _check(not _WIDE.search(str(getattr(__obj, "__self__", ""))))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return `left operator right` if that is no absurdly large thing."""
        if operator == "**":
            _check(abs(left) <= MAX_NUMBER and abs(right) <= 20)
        elif operator == "*":
            _check(_size(left) * _size(right) <= MAX_LENGTH)
        elif operator == "%" and isinstance(left, str):
            _check(not _WIDE.search(left))
        result = super().call_binop(context, operator, left, right)
        _check(_size(result) <= (MAX_NUMBER if isinstance(result, int) else MAX_LENGTH))
        return result

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Bounding().visit(super()._parse(source, name, filename))
        template.set_environment(self)
        return template


class _Bounding(NodeTransformer):
    """Puts a call of `step` into every loop and macro, and `+` in the place of `~`, which cannot be intercepted."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._counted(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._counted(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._counted(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        texts: list[nodes.Expr] = [
            nodes.Filter(item, "string", [], [], None, None, lineno=node.lineno) for item in node.nodes
        ]
        return reduce(lambda left, right: nodes.Add(left, right, lineno=node.lineno), texts)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if isinstance(node.value, int) and node.value > MAX_NUMBER:
            raise jinja2.TemplateSyntaxError(f"the number {node.value:.3g} is too large", node.lineno)
        return node

    def _counted(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        called = nodes.ImportedName(f"{__name__}.{step.__name__}")
        node.body.insert(0, nodes.ExprStmt(nodes.Call(called, [], [], None, None), lineno=node.lineno))
        return node


def _size(value: Any) -> int:
    if isinstance(value, int):
        return abs(value)
    return len(value) if isinstance(value, str | list | tuple) else 1


def _check(within: bool) -> None:
    if not within:
        raise SecurityError("it goes beyond what any conversation needs: a loop, a text or a number is too long")
