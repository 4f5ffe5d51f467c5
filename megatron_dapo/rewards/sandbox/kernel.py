"""Isolation by the Linux kernel, through ctypes: namespaces, mounts, Landlock and seccomp. Standard library only.

`runner` uses these functions. Each raises OSError if the kernel or the site does not allow what it does.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterable

UNPRIVILEGED = 65534  # the user for programs started by root; owns nothing
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
_CLONE_THREAD = 0x10000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_MS_RELATIME = 1 << 21
_MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 38, 22
_SYS_MOUNT_SETATTR = 442  # these four have the same number on all architectures
_SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_ADD, _SYS_LANDLOCK_RESTRICT = 444, 445, 446
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_libc = ctypes.CDLL(None, use_errno=True)


def _call(function: str, *arguments: object) -> int:
    """Call a C library function. Raises OSError if it returns a negative number."""
    found = getattr(_libc, function)(*arguments)
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")
    return found


def prctl(option: int, argument: int) -> None:
    """Set an attribute of this process."""
    _call("prctl", option, ctypes.c_ulong(argument), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def unshare(flags: int) -> None:
    """Move this process to new namespaces; a new PID namespace applies to its later children."""
    _call("unshare", flags)


def enter_user_namespace(uid: int, gid: int) -> None:
    """Map this process's ids, and no others, into the user namespace it has just created."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as stream:
            stream.write(text)


def become(uid: int) -> None:
    """Drop root and its groups for `uid`."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def drop_capabilities() -> None:
    """Drop every capability, including those in a user namespace, and prevent regaining any by running a program."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
    _call("capset", header, ctypes.create_string_buffer(24))


# ---- a separate root directory


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mount a file system; the arguments are those of mount(2)."""
    names = [None if text is None else text.encode() for text in (source, target, kind)]
    _call("mount", *names, ctypes.c_ulong(flags), options.encode())


def _read_only(target: str) -> None:
    """Make a bind mount and the mounts below it read-only."""
    attributes = ctypes.create_string_buffer(struct.pack("QQQQ", 1 | 2, 0, 0, 0))  # read-only, no set-user-id
    try:
        _call("syscall", _SYS_MOUNT_SETATTR, -100, target.encode(), 0x8000, attributes, ctypes.c_size_t(32))
    except OSError:  # Linux before 5.12: only the mount itself, with the flags that it must keep
        kept = os.statvfs(target).f_flag & 0xFFF
        mount("none", target, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_RELATIME | kept)


def make_mounts_private() -> None:
    """Keep later mounts within this mount namespace."""
    mount("none", "/", None, _MS_REC | _MS_PRIVATE)


def bind(source: str, target: str) -> None:
    """Bind-mount a file or directory, with the mounts below it, onto an existing path."""
    mount(source, target, None, _MS_BIND | _MS_REC)


def enter_root(readable: Iterable[str], workspace_mb: int, uid: int) -> None:
    """Switch to a root with `readable`, a few devices, /proc, and a /tmp of `workspace_mb`, the only writable part.

    This process must have a separate mount namespace.
    """
    make_mounts_private()
    devices = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
    links = {path: os.readlink(path) for path in readable if os.path.islink(path)}
    # Open these before anything is mounted over a part of their paths.
    sources = {
        path: os.open(path, os.O_PATH) for path in (*readable, *devices) if path not in links and os.path.exists(path)
    }
    root = "/tmp"
    before = os.umask(0o022)
    mount("tmpfs", root, "tmpfs", _MS_NOSUID, "mode=755,size=1m")
    os.mkdir(f"{root}/tmp")
    # Mount /tmp first: an interpreter may be installed below it.
    options = (
        f"mode=700,uid={uid},gid={uid if uid == UNPRIVILEGED else os.getgid()},size={workspace_mb}m,nr_inodes=4096"
    )
    mount("tmpfs", f"{root}/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    for path, descriptor in sources.items():
        target = root + path
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            os.makedirs(target, mode=0o755, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        bind(f"/proc/self/fd/{descriptor}", target)
        if path not in devices:
            _read_only(target)
        os.close(descriptor)
    for path, target in links.items():
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(target, root + path)
    os.makedirs(f"{root}/proc", exist_ok=True)
    os.symlink("/tmp", f"{root}/dev/shm")
    os.umask(before)
    try:
        mount("proc", f"{root}/proc", "proc", _MS_NOSUID | _MS_NODEV)
    except OSError:  # containers may hide parts of /proc; programs do without it
        pass
    os.chdir(root)
    _call("syscall", _SYS_PIVOT_ROOT[platform.machine()], b".", b".")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir("/")
    mount("none", "/", None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID)


# ---- without namespaces


def restrict_files(readable: Iterable[str], workspace: str) -> None:
    """Let this process and its children read `readable`, write `workspace`, and access nothing else (Landlock)."""
    abi = _call("syscall", _SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    read = 0b1101  # execute, read files, read directories
    every = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    network, scopes = (3 if abi >= 4 else 0), (3 if abi >= 6 else 0)  # TCP; abstract sockets and signals
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    rules = struct.pack("QQQ", every, network, scopes)[:size]
    ruleset = _call("syscall", _SYS_LANDLOCK_CREATE, ctypes.create_string_buffer(rules), ctypes.c_size_t(size), 0)
    allowed = dict.fromkeys(readable, read) | {workspace: every & ~(1 << 6), "/dev/null": 0b110}
    allowed |= {"/dev/urandom": 0b100, "/dev/zero": 0b100}
    for path, access in allowed.items():
        if os.path.exists(path):
            descriptor = os.open(path, os.O_PATH)
            access &= every if os.path.isdir(path) else 0b111
            rule = ctypes.create_string_buffer(struct.pack("=Qi", access, descriptor))
            _call("syscall", _SYS_LANDLOCK_ADD, ruleset, 1, rule, 0)
            os.close(descriptor)
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _call("syscall", _SYS_LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


# ---- system calls

_EPERM, _EACCES, _ENOSYS = 1, 13, 38
_ARCHITECTURE = 0xC000003E  # AUDIT_ARCH_X86_64
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
# x86-64 numbers: network, mounts, namespaces, other processes' memory, memory that no limit counts, kernel management.
_DENIED = {
    "socket": 41, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "pidfd_getfd": 438,
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsmount": 432, "mount_setattr": 442, "open_by_handle_at": 304,
    "shmget": 29, "shmat": 30, "msgget": 68, "semget": 64, "memfd_create": 319, "memfd_secret": 447, "mq_open": 240,
    "add_key": 248, "request_key": 249, "keyctl": 250, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
    "io_uring_setup": 425, "kexec_load": 246, "init_module": 175, "finit_module": 313, "reboot": 169, "swapon": 167,
    "acct": 163, "settimeofday": 164, "clock_settime": 227, "personality": 135, "quotactl": 179, "syslog": 103,
}  # fmt: skip
_DENIED_BESIDE_OTHERS = {
    "kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "pidfd_send_signal": 424,
    "pidfd_open": 434, "fork": 57, "vfork": 58, "setpriority": 141, "sched_setparam": 142, "sched_setscheduler": 144,
    "sched_setaffinity": 203, "sched_setattr": 314, "ioprio_set": 251, "setsid": 112, "setpgid": 109,
}  # fmt: skip
_CLONE, _CLONE3, _PRCTL, _PRLIMIT = 56, 435, 157, 302


def restrict_calls(has_namespaces: bool) -> None:
    """Deny this process and its children the system calls that test programs do not need (seccomp; x86-64 only).

    Without namespaces, also deny new processes and all actions on other processes of the same user.
    """
    if platform.machine() != "x86_64":
        raise OSError(_ENOSYS, f"no table of system calls for {platform.machine()}")
    denied = set(_DENIED.values()) | (set() if has_namespaces else set(_DENIED_BESIDE_OTHERS.values()))
    load_nr, load_arch, load_first, load_second = (_statement(0x20, offset) for offset in (0, 4, 16, 16))
    program = [load_arch, _jump(0x15, _ARCHITECTURE, 1, 0), _statement(0x06, _KILL), load_nr]
    program += [_jump(0x35, 0x40000000, 0, 1), _statement(0x06, _ERRNO | _ENOSYS)]  # the x32 calls
    for number in sorted(denied):
        program += [_jump(0x15, number, 0, 1), _statement(0x06, _ERRNO | _EACCES)]
    # clone3 has its flags in memory, which a filter cannot read; if denied, the C library uses clone.
    program += [_jump(0x15, _CLONE3, 0, 1), _statement(0x06, _ERRNO | _ENOSYS)]
    namespaces = NAMESPACES | CLONE_NEWUSER | 0x2000000
    program += [_jump(0x15, _CLONE, 0, 3), load_first, _jump(0x45, namespaces, 0, 1), _statement(0x06, _ERRNO | _EPERM)]
    program += [load_nr]
    if not has_namespaces:
        program += [_jump(0x15, _CLONE, 0, 3), load_first, _jump(0x45, _CLONE_THREAD, 1, 0)]
        program += [_statement(0x06, _ERRNO | _EPERM), load_nr]
        # Deny outliving the parent process and changing the limits of another process.
        program += [_jump(0x15, _PRCTL, 0, 3), load_first, _jump(0x15, PR_SET_PDEATHSIG, 0, 1)]
        program += [_statement(0x06, _ERRNO | _EPERM), load_nr]
        program += [_jump(0x15, _PRLIMIT, 0, 3), load_second, _jump(0x15, 0, 1, 0)]
        program += [_statement(0x06, _ERRNO | _EPERM)]
    program += [_statement(0x06, _ALLOW)]
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    code = ctypes.create_string_buffer(b"".join(program))
    filters = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    _call(
        "prctl",
        _PR_SET_SECCOMP,
        ctypes.c_ulong(2),
        ctypes.create_string_buffer(filters),
        ctypes.c_ulong(0),
        ctypes.c_ulong(0),
    )


def _statement(code: int, value: int) -> bytes:
    return struct.pack("HBBI", code, 0, 0, value)


def _jump(code: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
