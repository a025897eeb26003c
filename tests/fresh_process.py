"""Runs scripts in their own processes, forked from a process that has imported only torch, which takes 2 s."""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 600  # for one script: it takes longer only if it hangs

SERVER = f"""
import json, os, signal, sys, traceback, torch

for line in sys.stdin:
    script, arguments, folder = json.loads(line)
    child = os.fork()
    if child == 0:
        signal.alarm({SECONDS})
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor in (1, 2):
            os.dup2(os.open(f"{{folder}}/{{descriptor}}", os.O_WRONLY | os.O_CREAT), descriptor)
        sys.argv, status = ["-c", *arguments], 0
        try:
            exec(compile(script, "script", "exec"), {{"__name__": "__main__"}})
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def server() -> subprocess.Popen:
    """The server ends with this process, when its standard input closes."""
    # the checkout's root is not the working directory, so that scripts import the installed package
    return subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT / "tests",
    )


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess:
    """Runs `python -c script arguments` and captures its output."""
    with tempfile.TemporaryDirectory() as folder:
        server().stdin.write(json.dumps([script, arguments, folder]) + "\n")
        server().stdin.flush()
        status = int(server().stdout.readline())
        out, err = ((Path(folder) / descriptor).read_text() for descriptor in "12")
    return subprocess.CompletedProcess(script, status, out, err)


def run_fresh(script: str, *arguments: str) -> str:
    """What a script prints that ends without an error."""
    done = run_script(script, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout
