"""The arguments, checks and results of the operators.

Each operator has its arguments and results as a class. The schema, the fake kernel and the checks of every real kernel
follow from this class. So shapes, dtypes and errors cannot differ between eager, compiled and meta tensors. Inside the
package, this folder imports only math, objectives and support.

arguments.py, call.py            each operator's arguments and results as a class; how a class becomes schema and call;
                                 the shapes of a call are checked, and its results allocated
checks.py                        checks that entry operators share: operands, a buffer for a gradient, a sparse gradient
"""

from .call import Gradients, Outputs, allocate, outputs

__all__ = ["Gradients", "Outputs", "allocate", "outputs"]
