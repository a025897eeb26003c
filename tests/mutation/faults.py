"""Single faults of a source file: each replaces the text of one node of its syntax tree.

    arithmetic   + for -, * for /, ** and // for *           compare    < for <=, == for !=, in, is
    boolean      and for or                                  negated    a condition is turned round
    not          a `not` is dropped                          sign       a minus is dropped
    constant     one more, one less, a bool turned round     dim        of a reduction: 0 for 1, 0 for -1
    swapped      two neighbouring arguments that are names   keyword    an argument given by name is left out
    where        one side of a `where` always                mask       a load or store without its mask
    extreme      min for max                                 bound      a clamp or maximum is left out
    cast         .float(), .to(...), .detach() are dropped   removed    a call, an assignment to a part, a raise,
                                                                        an early return is left out

Annotations, docstrings, texts and what stands at import only for readers are left alone. A jit function is a function.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
COMPARE = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
REDUCTIONS = {"sum", "mean", "max", "min", "amax", "amin", "argmax", "argmin", "any", "all", "cumsum", "logsumexp"}
REDUCTIONS |= {"softmax", "log_softmax", "cat", "stack", "unsqueeze", "squeeze", "gather", "scatter_add", "unbind"}
EXTREMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
CASTS = {"float", "double", "to", "detach"}
MASKS = {"mask"}
# keywords that change no result, at least none on the CPU
OF_SPEED = {
    "num_warps",
    "num_stages",
    "eviction_policy",
    "cache_modifier",
    "is_pure",
    "pack",
    "strict",
    "stacklevel",
    "device",
}


@dataclass(frozen=True)
class Fault:
    start: int  # bytes of the source
    end: int
    line: int
    statement: int  # the first line of the statement around it
    operator: str
    before: str
    after: str

    def applied_to(self, source: str) -> str:
        text = source.encode()
        return (text[: self.start] + self.after.encode() + text[self.end :]).decode()


def faults_of(source: str) -> list[Fault]:
    lines = source.encode().splitlines(keepends=True)
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    tree = ast.parse(source)
    found = []
    for statement in _statements(tree):
        for operator, node, replacement in _faults_in(statement):
            start = offsets[node.lineno - 1] + node.col_offset
            end = offsets[node.end_lineno - 1] + node.end_col_offset
            before = source.encode()[start:end].decode()
            after = replacement if isinstance(replacement, str) else f"({ast.unparse(replacement)})"
            if after.strip("()") != ast.unparse(node).strip("()"):
                found.append(Fault(start, end, node.lineno, statement.lineno, operator, before, after))
    return found


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Every statement but docstrings and other texts, imports, `__all__` and what only types read."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("__all__", "__version__"):
            continue
        if isinstance(node, ast.stmt):
            yield node
        if isinstance(node, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield from _statements(node)


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Those of the statement itself, without annotations and without the statements within it."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        arguments = statement.args if isinstance(statement, ast.FunctionDef) else None
        roots: list[ast.AST] = [*arguments.defaults, *filter(None, arguments.kw_defaults)] if arguments else []
    elif isinstance(statement, ast.AnnAssign):
        roots = [statement.value] if statement.value else []
    elif isinstance(statement, ast.Raise):
        roots = []  # its text
    else:
        roots = [child for child in ast.iter_child_nodes(statement) if isinstance(child, (ast.expr, ast.withitem))]
    while roots:
        node = roots.pop()
        if isinstance(node, ast.JoinedStr):
            continue
        if isinstance(node, ast.expr):
            yield node
        roots += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]


def _faults_in(statement: ast.stmt) -> Iterator[tuple[str, ast.AST, ast.expr | str]]:
    yield from _of_statement(statement)
    for node in _expressions(statement):
        yield from _of_expression(node)


def _of_statement(node: ast.stmt) -> Iterator[tuple[str, ast.AST, ast.expr | str]]:
    if isinstance(node, (ast.If, ast.While)):
        yield "negated", node.test, ast.UnaryOp(ast.Not(), node.test)
    if isinstance(node, ast.Raise):
        yield "removed", node, "pass"
    if isinstance(node, ast.AugAssign):
        yield "removed", node, "pass"
        if type(node.op) in ARITHMETIC:
            yield "arithmetic", node, ast.unparse(ast.AugAssign(node.target, ARITHMETIC[type(node.op)](), node.value))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "removed", node, "pass"
    if isinstance(node, ast.Assign) and any(isinstance(to, (ast.Subscript, ast.Attribute)) for to in node.targets):
        yield "removed", node, "pass"
    if isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Return):
        yield "removed", node.body[-1], "pass"


def _of_expression(node: ast.expr) -> Iterator[tuple[str, ast.AST, ast.expr | str]]:
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_text(node) and not _is_type(node):
        yield "arithmetic", node, ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            changed = [*node.ops[:place], COMPARE[type(operator)](), *node.ops[place + 1 :]]
            yield "compare", node, ast.Compare(node.left, changed, node.comparators)
    if isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "boolean", node, ast.BoolOp(other, node.values)
    if isinstance(node, ast.IfExp):
        yield "negated", node.test, ast.UnaryOp(ast.Not(), node.test)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", node, node.operand
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "sign", node, node.operand
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        if isinstance(node.value, bool):
            yield "constant", node, ast.Constant(not node.value)
        else:
            yield "constant", node, ast.Constant(node.value + 1)
            yield "constant", node, ast.Constant(node.value - 1)
    if isinstance(node, ast.Call):
        yield from _of_call(node)


def _of_call(node: ast.Call) -> Iterator[tuple[str, ast.AST, ast.expr | str]]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    for place, (one, other) in enumerate(zip(node.args, node.args[1:])):
        if isinstance(one, ast.Name) and isinstance(other, ast.Name) and one.id != other.id:
            changed = [*node.args[:place], other, one, *node.args[place + 2 :]]
            yield "swapped", node, ast.Call(node.func, changed, node.keywords)
    for keyword in node.keywords:
        if keyword.arg is not None and keyword.arg not in OF_SPEED and not _is_zero_where_masked(keyword):
            rest = [other for other in node.keywords if other is not keyword]
            kind = "mask" if keyword.arg in MASKS else "keyword"
            yield kind, node, ast.Call(node.func, node.args, rest)
    if name == "where" and len(node.args) == 3:
        yield "where", node, node.args[1]
        yield "where", node, node.args[2]
    if name in REDUCTIONS:
        yield from (("dim", node, changed) for changed in _other_dims(node))
    if name in EXTREMES:
        renamed = (
            ast.Attribute(node.func.value, EXTREMES[name])
            if isinstance(node.func, ast.Attribute)
            else ast.Name(EXTREMES[name])
        )
        yield "extreme", node, ast.Call(renamed, node.args, node.keywords)
    if name in ("clamp", "clamp_", "clamp_min", "nan_to_num") and isinstance(node.func, ast.Attribute):
        yield "bound", node, node.func.value
    if name in ("minimum", "maximum") and len(node.args) == 2:
        yield "bound", node, node.args[0]
    if name in CASTS and isinstance(node.func, ast.Attribute):
        yield "cast", node, node.func.value


def _is_zero_where_masked(keyword: ast.keyword) -> bool:
    """The interpreter loads 0 where nothing is said, a GPU whatever is there."""
    return keyword.arg == "other" and ast.unparse(keyword.value) in ("0", "0.0")


def _other_dims(node: ast.Call) -> Iterator[ast.Call]:
    dims = {"0": 1, "1": 0, "-1": 0}
    for place, argument in enumerate(node.args):
        if ast.unparse(argument) in dims:
            other = ast.Constant(dims[ast.unparse(argument)])
            yield ast.Call(node.func, [*node.args[:place], other, *node.args[place + 1 :]], node.keywords)
    for place, keyword in enumerate(node.keywords):
        if keyword.arg in ("dim", "axis") and ast.unparse(keyword.value) in dims:
            other = ast.keyword(keyword.arg, ast.Constant(dims[ast.unparse(keyword.value)]))
            yield ast.Call(node.func, node.args, [*node.keywords[:place], other, *node.keywords[place + 1 :]])


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(side, ast.JoinedStr) or _is_constant_text(side) for side in (node.left, node.right))


def _is_constant_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_type(node: ast.BinOp) -> bool:
    """`Tensor | None`, outside an annotation."""
    sides = {ast.unparse(side).rpartition(".")[2] for side in (node.left, node.right)}
    return isinstance(node.op, ast.BitOr) and bool(sides & {"None", "Tensor", "int", "float", "bool", "str"})
