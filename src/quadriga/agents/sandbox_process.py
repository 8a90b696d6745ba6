"""The program that a sandbox starts: it isolates itself, and runs a command within limits.

`python -I -S sandbox_process.py STATUS_FD` reads a request (JSON) from its standard input. It tells
in lines of JSON at STATUS_FD `{"isolated": bool, "why": text}` and, when the command has ended,
`{"code": exit code, "memory": whether it was killed because it used too much}`.

    this process    new namespaces: mounts, processes, network, IPC, host name
    └ init          process 1 of its namespace, with a file system of its own; when it ends, the
      │             kernel kills all processes of the namespace
      └ command     without privileges, with limits

The file system holds Python and the libraries of the system, read only, and three folders that can
be written, which are in memory and end with the processes. It imports the standard library only, so
that it starts in milliseconds and has nothing of the run in its memory.
"""

import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

# Of <linux/sched.h>, <linux/mount.h> and <linux/prctl.h>.
_NEW_USER, _NEW_NET, _NEW_PID, _NEW_MOUNT = 0x10000000, 0x40000000, 0x20000000, 0x20000
_NEW_IPC, _NEW_UTS = 0x08000000, 0x04000000
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_NOSUID, _NODEV, _NOEXEC, _DETACH = 0x2, 0x4, 0x8, 0x2
_AT_RECURSIVE, _READ_ONLY, _AT_FDCWD = 0x8000, 0x1, -100
_MOUNT_SETATTR, _PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
_DEATH_SIGNAL, _NO_NEW_PRIVS = 1, 38

_libc = ctypes.CDLL(None, use_errno=True)
_SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives"
)  # fmt: skip
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_CHECK_S = 0.05  # how often init looks at the memory of the processes
_FIRST_USER = 2_000_000_000


def _check(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags))
    _check(_libc.mount(*arguments, options.encode()), f"mount {target}")


def _bind(path: str, root: str) -> None:
    """Show a file or folder at the same path under `root`, read only."""
    target = Path(root + path)
    if path in _SYSTEM and os.path.islink(path):  # /bin is usr/bin
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(os.readlink(path))
        return
    folder = os.path.isdir(path)
    (target if folder else target.parent).mkdir(parents=True, exist_ok=True)
    if not folder:
        target.touch()
    _mount(path, str(target), "", _BIND | _RECURSIVE)
    if path not in _DEVICES:
        what = (_AT_FDCWD, str(target).encode(), _AT_RECURSIVE)
        attributes = (ctypes.c_uint64 * 4)(_READ_ONLY | _NOSUID, 0, 0, 0)
        found = _libc.syscall(_MOUNT_SETATTR, *what, attributes, ctypes.c_size_t(32))
        _check(found, f"mount {target} read only")


def _new_namespaces() -> None:
    """Put this process and its children into new namespaces. Root needs no new user."""
    flags = _NEW_NET | _NEW_PID | _NEW_MOUNT | _NEW_IPC | _NEW_UTS
    user, group = os.getuid(), os.getgid()
    if user == 0:
        _check(_libc.unshare(flags), "unshare")
        return
    _check(_libc.unshare(flags | _NEW_USER), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _new_root(folders: list[str], megabytes: int) -> None:
    """Give this process a file system of its own, with Python and the libraries of the system."""
    root = "/sys"  # a folder that every system has, and nothing of which is shown
    _mount("none", "/", "", _RECURSIVE | _PRIVATE)
    options = f"size={megabytes}m,nr_inodes=20000,mode=755"
    _mount("sandbox", root, "tmpfs", _NOSUID | _NODEV, options)
    shown: list[str] = []
    for path in (*_SYSTEM, *_DEVICES, *folders):
        inside = any(path == other or path.startswith(f"{other}/") for other in shown)
        if os.path.lexists(path) and not inside:
            _bind(path, root)
            shown.append(path)
    for name in ("/work", "/tmp", "/dev/shm", "/proc", "/old"):
        Path(root + name).mkdir(parents=True, exist_ok=True)
        os.chmod(root + name, 0o1777)
    # A kernel that hides parts of /proc from this process refuses a new one: then there is none.
    with contextlib.suppress(OSError):
        _mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    os.chdir(root)
    number = _PIVOT_ROOT[os.uname().machine]
    _check(_libc.syscall(number, b".", b"old"), "pivot_root")
    os.chdir("/")
    _check(_libc.umount2(b"/old", _DETACH), "umount")
    os.rmdir("/old")


def _limit(request: dict[str, Any], isolated: bool) -> None:
    size = request["memory_mb"] << 20
    limits = {
        resource.RLIMIT_AS: size,
        resource.RLIMIT_CPU: request["cpu_s"],
        resource.RLIMIT_FSIZE: size,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
    }
    if isolated:  # otherwise all processes of the user would count
        limits[resource.RLIMIT_NPROC] = request["processes"]
    for name, value in limits.items():
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


def _command(request: dict[str, Any], isolated: bool, user: int) -> NoReturn:
    """Become the command: without privileges, and without what this process has open."""
    os.chdir(request["folder"])
    _limit(request, isolated)
    if isolated and os.getuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    for name, text in request["files"].items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8", errors="replace")
    _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    _libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.execve(request["argv"][0], request["argv"], request["environment"])


def _used_memory() -> int:
    """Return the bytes that the processes of this namespace use, without shared libraries."""
    pages = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            with contextlib.suppress(OSError, IndexError, ValueError):
                resident, shared = Path(f"/proc/{name}/statm").read_text().split()[1:3]
                pages += int(resident) - int(shared)
    return pages * resource.getpagesize()


def _wait(command: int, most: float) -> dict[str, object]:
    """Collect the processes that end until the command has; kill it if they use too much memory."""
    over = False
    while True:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == command:
                    return {"code": os.waitstatus_to_exitcode(found[1]), "memory": over}
        signal.sigtimedwait([signal.SIGCHLD], _CHECK_S)
        if most < math.inf and _used_memory() > most:
            over = True
            assert os.getpid() == 1  # of a namespace of its own, not of the machine
            os.kill(-1, signal.SIGKILL)  # all but this process


def main() -> None:
    """Read the request, isolate this process, and run the command."""
    status = int(sys.argv[1])
    os.set_inheritable(status, False)
    _libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    os.umask(0o022)
    # As root, a user id of its own for each sandbox: the limit of processes counts all of one user.
    user = _FIRST_USER + os.getpid()
    request = json.loads(sys.stdin.buffer.read())
    isolated, why = True, ""
    try:
        _new_namespaces()
    except (OSError, AttributeError) as error:
        isolated, why = False, str(error)
    init = os.fork()
    if init:
        os._exit(0 if os.waitpid(init, 0)[1] == 0 else 1)
    _libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if isolated:
        try:
            _new_root(request["shown"], request["memory_mb"])
        except (OSError, AttributeError, KeyError) as error:
            isolated, why = False, str(error)
    os.write(status, (json.dumps({"isolated": isolated, "why": why}) + "\n").encode())
    if not isolated and not request["allow_unisolated"]:
        os._exit(0)
    if isolated:
        request["folder"] = "/work"
    command = os.fork()
    if not command:
        try:
            _command(request, isolated, user)
        except Exception as error:  # told as the output of the command
            os.write(2, f"the command cannot start: {error}\n".encode())
        os._exit(127)
    # `_wait` kills all other processes of the namespace, so it must be one of the sandbox alone.
    watched = isolated and os.getpid() == 1 and os.path.isdir("/proc/1")
    ended = _wait(command, request["memory_mb"] << 20 if watched else math.inf)
    os.write(status, (json.dumps(ended) + "\n").encode())
    os._exit(0)


if __name__ == "__main__":
    main()
