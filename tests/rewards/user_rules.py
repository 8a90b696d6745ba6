"""A reward file of a user, with functions that return, raise, hang and crash."""

import asyncio
import os
import signal
import time


def by_length(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(len(solution_str)), "digits": sum(c.isdigit() for c in solution_str)}


def moody(data_source, solution_str, ground_truth, extra_info=None):
    """Do what the ground truth says."""
    if ground_truth == "hang":
        time.sleep(3600)
    if ground_truth == "crash":
        os._exit(7)
    if ground_truth == "abort":
        os.abort()
    if ground_truth == "raise":
        raise RuntimeError("no mood")
    if ground_truth == "exit":
        raise SystemExit(3)
    if ground_truth == "text":
        return "1.0"
    if ground_truth == "nan":
        return float("nan")
    return 1.0


def killed(data_source, solution_str, ground_truth, extra_info=None):
    """Count its calls in the file that the ground truth names, and be killed in the first ones."""
    kills, file = ground_truth.split()
    with open(file, "a+") as calls:
        if calls.write(".") + calls.tell() - 1 <= int(kills):
            calls.close()
            os.kill(os.getpid(), 9)
    return 1.0


def process_id(data_source, solution_str, ground_truth, extra_info=None):
    return os.getpid()


def too_few(solution_str):
    return 1.0


async def asks_a_judge(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.001)
    return len(solution_str)


MET = []
ONE = asyncio.Semaphore(1)


async def waiting(data_source, solution_str, ground_truth, extra_info):
    """Do what the ground truth says. Two that meet return when both have been called."""
    if ground_truth == "meet":
        MET.append(1)
        while len(MET) < 2:
            await asyncio.sleep(0.01)
    if ground_truth == "sleep":
        await asyncio.sleep(3600)
    if ground_truth == "main thread":
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if ground_truth == "one by one":
        async with ONE:
            await asyncio.sleep(0.01)
    return moody(data_source, solution_str, {"block": "hang"}.get(ground_truth, ground_truth))
