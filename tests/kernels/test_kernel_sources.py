"""What Triton reads of the kernels' sources is what inspect and Triton itself would read, and so are its launchers."""

import json

import pytest
from fresh_process import run_script

pytest.importorskip("triton")

READ = """
import importlib, inspect, json, os, pkgutil
os.environ.pop("TRITON_INTERPRET", None)
import flce_ops, flce_ops.triton, triton
from flce_ops.triton.launch import sources

calls, from_inspect = [], inspect.getsourcelines
inspect.getsourcelines = lambda function: calls.append(function) or from_inspect(function)
for module in pkgutil.walk_packages(flce_ops.triton.__path__, "flce_ops.triton."):
    importlib.import_module(module.name)
functions = dict(sources.jitted())
others = [name for name, made in functions.items() if sources.source_lines(made.fn) != from_inspect(made.fn)]
read = [function.raw_src == from_inspect(function.fn)[0] for function in functions.values()]

for function in functions.values():
    function.cache_key
made = sources.hashes()
for function in functions.values():
    function.hash = None
sources.know_hashes({name: made[name] for name in list(made)[1:]})
kept = [function.hash for function in functions.values()]
for function in functions.values():
    function.cache_key
print(json.dumps([others, all(read), len(functions), [c.__name__ for c in calls if c.__module__.startswith("flce_ops")],
                  made == sources.hashes() == {name: f.cache_key for name, f in functions.items()}, kept.count(None)]))
"""


def test_triton_reads_the_lines_of_each_kernel_and_its_hash_as_inspect_and_triton_make_them():
    done = run_script(READ)
    assert done.returncode == 0, done.stderr
    others, read, functions, tokenized, hashes_equal, hashed_again = json.loads(done.stdout)
    assert others == [] and read and functions > 100
    assert hashes_equal and hashed_again == 1  # the only one whose hash was not known
    assert tokenized == []


def test_a_function_without_positions_or_of_another_package_is_read_by_inspect(monkeypatch):
    import inspect

    from flce_ops.triton.launch import sources

    def function(x):
        return (
            x,
        )  # fmt: skip

    assert sources.source_lines(function) == inspect.getsourcelines(function)
    monkeypatch.setattr(sources, "PACKAGE", __name__.partition(".")[0])
    function.__module__ = f"{sources.PACKAGE}.of_the_package"
    assert sources.source_lines(function) == inspect.getsourcelines(function)
    monkeypatch.setattr(sources, "last_line", lambda code: None)
    assert sources.source_lines(function) == inspect.getsourcelines(function)


def test_positions_that_python_was_told_to_leave_out_are_noticed():
    from flce_ops.triton.launch.sources import last_line

    class Code:
        co_consts = ()

        def __init__(self, *positions):
            self.co_positions = lambda: positions

    assert last_line(Code((1, 1, 0, 2), (2, 4, 4, 5))) == 4
    assert last_line(Code((1, 1, None, None), (2, 2, None, None))) is None


LOAD = """
import importlib.util, os, tempfile
os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
import flce_ops.triton
from triton.runtime.build import compile_module_from_src

MODULE = '''
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&module); }
'''

def imported(path):
    spec = importlib.util.spec_from_file_location("launcher", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

first = [compile_module_from_src(MODULE % number, "launcher") for number in (1, 2)]
again = [compile_module_from_src(MODULE % number, "launcher") for number in (1, 2)]
print([made.launch() for made in first + again])
print([module.launch() for module in [imported(made.__file__) for made in first]])
"""


def test_a_launcher_that_is_read_again_is_not_that_of_another_signature():
    """Python alone has one module for both files, which the second line shows. If it does not, launchers.py can go."""
    done = run_script(LOAD)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[1, 2, 1, 2]", "[2, 2]"]
