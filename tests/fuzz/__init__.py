"""Random cases of the operators against dense torch: `python -m tests.fuzz --cases 20000 --seed 1 [--device cuda]`.

A case is a choice on each axis, Source x Objective x Sink x Layout, with dtypes, strides, ranges up to overflow,
ignored tokens, workspaces, operands made from one another.

    cases.py     a case: shapes, dtypes, layouts, options, what depends on what, how derivatives are asked for
    draw.py, consistent.py   how one is drawn, and which arguments go together
    problem.py   a case's tensors, and the graph from its leaves to the arguments of the function
    oracle.py    the same functions on dense logits
    ours.py      the functions and modules of the package
    run.py       outputs, first and second derivatives of both
    judge.py     whether the package's results are as close to the float64 result as plain torch's
    exact.py     what must hold exactly
    report.py    runs many cases, groups failures by likely cause, and reduces the first of each group
    triton_on_cpu.py   the Triton kernels in place of the ATen ones, in Triton's interpreter

Each case runs three times along one graph: with this package, with plain torch in the same dtypes (the yardstick), and
with plain torch in float64 on the same rounded leaves (the truth).
"""
