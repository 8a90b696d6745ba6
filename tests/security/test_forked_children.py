"""A copy of the driver that the user's code has forked ends by its signals, and nothing else does.

`multiprocessing.Pool.terminate` sends SIGTERM. A copy that ran the handler of Ray would close the
connections of the driver, which then waits for ever; one that ran the handler of a run would go on.
"""

import pytest

from processes import run_python

HEAD = """
import contextlib, faulthandler, os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
"""
DRIVERS = {
    "ray": (
        "from quadriga.backends.ray import RayBackend, ensure_ray\n"
        "from ray.util import placement_group_table as call\n"
        "ensure_ray(num_cpus=1, object_store_memory=80_000_000)\n"
        "scope = contextlib.nullcontext()\n"
    ),
    "a run": (
        "from quadriga.config.schema import RunConfig\n"
        "from quadriga.trainer.checkpoints import StopRequest\n"
        "call, stop, scope = int, StopRequest(RunConfig()), contextlib.ExitStack()\n"
        "scope.enter_context(stop.listening())\n"
        "scope.enter_context(stop.steps())\n"
    ),
    "a command": (
        "from quadriga.cli.main import _stopped_by_sigterm as stopped\n"
        "call, scope = int, stopped()\n"
    ),
}
FORKS = """
with scope:
    call()
    for number in (signal.SIGTERM, signal.SIGINT):
        child = os.fork()
        if not child:
            try:
                time.sleep(30)
            except KeyboardInterrupt:
                os._exit(number)
            os._exit(99)
        time.sleep(0.3)
        os.kill(child, number)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    faulthandler.dump_traceback_later(20, exit=True)
    call()
"""


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_copy_of_the_driver_ends_by_its_signal(driver):
    program = HEAD + DRIVERS[driver] + FORKS
    assert run_python("-c", program, timeout=100).stdout.split() == ["-15", "2"]
