"""A case whose process is ended by a signal runs once more, in new processes, and says what the process was doing."""

import os
import resource
import signal

import pytest
import torch.distributed as dist
from process_pool import run_in_world


def test_a_crash_is_reported_and_the_case_runs_once_more(tmp_path):
    with pytest.warns(UserWarning, match="signal 6 ended process 1\n(.*\n)+.*in abort_the_first_time") as caught:
        run_in_world(("cpu", 2), abort_the_first_time, tmp_path)
    assert len(caught) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "first"]  # both ranks ended the second run


def abort_the_first_time(device, folder):
    dist.barrier()
    if dist.get_rank() == 1 and not (folder / "first").exists():
        (folder / "first").touch()
        abort()
    dist.barrier()
    (folder / str(dist.get_rank())).touch()


def test_a_case_that_crashes_twice_fails():
    with pytest.warns(UserWarning, match="abort_every_time runs again"):
        with pytest.raises(pytest.fail.Exception, match="abort_every_time"):
            run_in_world(("cpu", 2), abort_every_time)


def abort_every_time(device):
    dist.barrier()
    if dist.get_rank() == 1:
        abort()
    dist.barrier()


def abort():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no file of the process's memory
    os.kill(os.getpid(), signal.SIGABRT)
