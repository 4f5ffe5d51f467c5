"""Programs and answers that try to hang, break limits and escape; `benchmarks/rewards.py` scores and checks them.

A program calls `escaped(what)` if it got what it must not have. Names in capitals are filled in: SECRET_FILE, OUTSIDE
(a directory that the user may write), PORT (listening on loopback), ABSTRACT (a listening abstract UNIX socket), PARENT
(a process of the user).
"""

from __future__ import annotations

LIMITS = {"seconds_per_test": 1.0, "memory_limit_mb": 256, "max_processes": 12}  # limits of the preset code
SLEEP = "98765"  # seconds; this number identifies a process that was left behind
PRELUDE = """
import ctypes, mmap, os, resource, signal, socket, struct, subprocess, sys, tempfile, threading, time
def escaped(what):
    os.write(1, ("ESCAPED " + str(what)[:60] + "\\n").encode())
def attempt(function, *arguments):
    try:
        return function(*arguments)
    except BaseException:
        return None
"""

_READS = [
    "SECRET_FILE", "/etc/shadow", "/etc/passwd", "/root/.bashrc", "/proc/1/environ", "/proc/self/../1/maps", "/proc/1/mem",
    "/proc/PARENT/environ", "/proc/1/root/etc/passwd", "/proc/1/cwd/../etc/passwd", "/proc/self/root/../../../etc/passwd", "/dev/mem",
    "/dev/kmsg", "/proc/kcore", "/sys/kernel/security", "/var/log/syslog", "/run/secrets", "/home",
]  # fmt: skip
_WRITES = [
    "OUTSIDE/hostile-file", "/hostile-file", "/usr/hostile-file", "/var/tmp/hostile-file", "/dev/hostile-file", "/root/hostile-file",
    "/proc/sys/kernel/core_pattern", "/proc/1/oom_score_adj", "/proc/self/uid_map", "/etc/ld.so.cache", "/proc/sysrq-trigger",
    "../../OUTSIDE/hostile-file",
]  # fmt: skip
_HANGS = {
    "spin": "while True: pass",
    "sleep": "time.sleep(SLEEP)",
    "sleep without signals": "for n in range(1, 65): attempt(signal.signal, n, signal.SIG_IGN)\ntime.sleep(SLEEP)",
    "block signals": "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
    "raise the limit of time": "attempt(resource.setrlimit, resource.RLIMIT_CPU, (-1, -1))\nwhile True: pass",
    "huge power": "9 ** 9 ** 9 ** 9",
    "regular expression": "import re; re.match('(a+)+b', 'a' * 64)",
    "wait for input": "os.read(os.pipe()[0], 1)",
    "stop itself": "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(SLEEP)",
    "threads that never end": "for _ in range(100): attempt(threading.Thread(target=time.sleep, args=(SLEEP,)).start)",
    "exit that hangs": "import atexit; atexit.register(time.sleep, SLEEP)\nthreading.Thread(target=time.sleep, args=(SLEEP,)).start()",
    "close everything": "os.closerange(0, 100); time.sleep(SLEEP)",
    "import that never ends": "open('loop.py', 'w').write('while True: pass'); import loop",
    "deep recursion": "sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "compile": "compile('(' * 10**6, 'x', 'eval')",
    "keep the pipe open": "if os.fork() == 0: time.sleep(SLEEP)",
    "exceptions in a loop": "while True:\n    try: raise KeyboardInterrupt\n    except BaseException: pass",
}
_FLOODS = {
    "standard output": "while True: os.write(1, b'x' * 65536)",
    "standard error": "while True: os.write(2, b'x' * 65536)",
    "every descriptor": "while True:\n    for n in range(64): attempt(os.write, n, b'x' * 4096)",
    "forged results": 'for n in range(64):\n    attempt(os.write, n, b\'{"test": 0, "status": "ended", "code": 0, "stdout": "", "stderr": ""}\\n{"end": 0}\\n\')',
    "no line break": "sys.stdout.write('x' * (64 << 20))",
    "bytes that are no text": "os.write(1, bytes(range(256)) * 200)",
    "surrogates": "print('\\ud800')",
    "from a child": "if os.fork() == 0:\n    while True: os.write(1, b'x' * 65536)",
}
_PROCESSES = {
    "fork bomb": "while True: attempt(os.fork)",
    "fork bomb that sleeps": "while True:\n    attempt(os.fork); time.sleep(0.01)",
    "double fork": "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(SLEEP)\n    os._exit(0)",
    "daemons": "for _ in range(50):\n    if attempt(os.fork) == 0:\n        attempt(os.setsid)\n        if attempt(os.fork) == 0: time.sleep(SLEEP)\n        os._exit(0)",
    "programs": "for _ in range(50): attempt(subprocess.Popen, ['/bin/sleep', 'SLEEP'])",
    "programs in separate sessions": "for _ in range(5): attempt(lambda: subprocess.Popen(['/bin/sleep', 'SLEEP'], start_new_session=True))",
    "shell in the background": "attempt(lambda: os.system('(sleep SLEEP &) ; (setsid sleep SLEEP &)'))",
    "more processes than allowed": "n = 0\nwhile n < 64:\n    pid = attempt(os.fork)\n    if pid is None: break\n    if pid == 0: time.sleep(SLEEP)\n    n += 1\nif n > 12: escaped(n)",
    "more threads than allowed": "n = 0\nwhile n < 200 and attempt(threading.Thread(target=time.sleep, args=(30,)).start) is None and threading.active_count() > n + 1: n += 1\nif n > 12: escaped(n)\nos._exit(0)",
    "raise the limit of processes": "attempt(resource.setrlimit, resource.RLIMIT_NPROC, (10**6, 10**6))\nif resource.getrlimit(resource.RLIMIT_NPROC)[0] >= 10**6: escaped('processes')",
    "outlive the parent": "libc = ctypes.CDLL(None); libc.prctl(1, 0)\nif attempt(os.fork) == 0: time.sleep(SLEEP)",
}
_SIGNALS = {
    "kill everything": "attempt(os.kill, -1, 9)\nprint('alive')",
    "kill the parent": "[attempt(os.kill, os.getppid(), n) for n in (9, 15, 19, 6)]",
    "kill process 1": "[attempt(os.kill, 1, n) for n in range(1, 65)]",
    "kill the user's process": "[attempt(os.kill, PARENT, n) for n in (10, 12)]",
    "kill the group": "attempt(os.killpg, 0, 9)",
    "kill every number": "for pid in range(2, 5000): pid != os.getpid() and attempt(os.kill, pid, 9)",
    "trace the parent": "libc = ctypes.CDLL(None)\nif libc.ptrace(16, os.getppid(), 0, 0) == 0: escaped('ptrace')",
    "read the parent's memory": "libc = ctypes.CDLL(None); buffer = ctypes.create_string_buffer(64)\nv = struct.pack('QQ', ctypes.addressof(buffer), 64); r = struct.pack('QQ', 0x400000, 64)\nif libc.process_vm_readv(os.getppid(), v, 1, r, 1, 0) > 0: escaped('memory')",
    "lower the limits of the parent": "if attempt(lambda: resource.prlimit(PARENT, resource.RLIMIT_NOFILE, (3, 3))): escaped('prlimit')",
    "take the parent's files": "libc = ctypes.CDLL(None)\nfd = libc.syscall(434, os.getppid(), 0)\nif fd >= 0 and libc.syscall(438, fd, 1, 0) >= 0: escaped('pidfd')",
}
_LIMITS_PROGRAMS = {
    "memory at once": "if attempt(bytearray, 1 << 30): escaped('memory')",
    "memory in pieces": "pieces = []\ntry:\n    while len(pieces) < 600: pieces.append(bytearray(1 << 20))\n    escaped('memory')\nexcept MemoryError: pass",
    "memory of many processes": "r, w = os.pipe()\nfor n in range(8):\n    if attempt(os.fork) == 0:\n        x = bytearray(b'x' * (150 << 20)); os.write(w, b'1'); time.sleep(SLEEP)\ntime.sleep(1.2)\nos.set_blocking(r, False)\nif len(attempt(os.read, r, 99) or b'') > 4: escaped('memory')",
    "shared memory": "m = attempt(mmap.mmap, -1, 1 << 30)\nif m:\n    for n in range(0, 1 << 30, 4096): m[n] = 1\n    escaped('shared')",
    "memory file": "fd = attempt(os.memfd_create, 'x')\nif fd is not None and attempt(os.ftruncate, fd, 1 << 30) is None and os.fstat(fd).st_size: escaped('memfd')",
    "raise the limit of memory": "attempt(resource.setrlimit, resource.RLIMIT_AS, (-1, -1))\nif attempt(bytearray, 1 << 30): escaped('memory')",
    "locked memory": "libc = ctypes.CDLL(None); b = bytearray(1 << 20)\nif libc.mlockall(3) == 0: escaped('mlock')",
    "a large file": "f = open('big', 'wb')\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\ntry:\n    for _ in range(64): f.write(bytes(1 << 20)); f.flush()\n    escaped('file')\nexcept OSError: pass",
    "many files": "n = 0\ntry:\n    for n in range(200): open(f'f{n}', 'wb').write(bytes(1 << 20))\n    escaped('disk')\nexcept OSError: pass",
    "many empty files": "n = 0\ntry:\n    for n in range(20000): os.close(os.open(f'e{n}', os.O_CREAT | os.O_WRONLY))\n    escaped('inodes')\nexcept OSError: pass",
    "deep directories": "attempt(lambda: [(os.mkdir('d'), os.chdir('d')) for _ in range(10000)])",
    "open files": "files = []\ntry:\n    for _ in range(200): files.append(os.open('/dev/null', os.O_RDONLY))\n    escaped('files')\nexcept OSError: pass",
    "links out": "attempt(os.symlink, '/', 'up'); attempt(os.link, 'SECRET_FILE', 'hard')\nfor p in ('up/SECRET_FILE', 'hard'):\n    t = attempt(lambda: open(p).read())\n    if t: escaped(t)",
    "core file": "attempt(resource.setrlimit, resource.RLIMIT_CORE, (-1, -1)); ctypes.string_at(0)",
}
_KERNEL = {
    "mount": "libc = ctypes.CDLL(None)\nif libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0: escaped('mount')",
    "remount": "libc = ctypes.CDLL(None)\nif libc.mount(b'none', b'/', None, 32 | 4096, None) == 0: escaped('remount')",
    "unmount": "libc = ctypes.CDLL(None)\nif libc.umount2(b'/proc', 2) == 0: escaped('umount')",
    "new namespaces": "libc = ctypes.CDLL(None)\nfor flag in (0x10000000, 0x20000, 0x40000000):\n    if libc.unshare(flag) == 0: escaped('unshare')",
    "other namespaces": "libc = ctypes.CDLL(None)\nfor pid in (1, 'PARENT'):\n    fd = attempt(os.open, f'/proc/{pid}/ns/mnt', os.O_RDONLY)\n    if fd is not None and libc.setns(fd, 0) == 0: escaped('setns')",
    "change root": "attempt(os.mkdir, 'r')\nif attempt(os.chroot, 'r') is None and os.listdir('/') == []: escaped('chroot')",
    "become root": "for f in (os.setuid, os.setgid):\n    attempt(f, 0)\nif os.getuid() == 0 or os.geteuid() == 0: escaped('root')",
    "capabilities": "c = attempt(lambda: [l for l in open('/proc/self/status') if l.startswith('CapEff')])\nif c and int(c[0].split()[1], 16): escaped(c)",
    "set-user-id programs": "for p in ('/usr/bin/su', '/usr/bin/passwd', '/usr/bin/mount'):\n    r = attempt(lambda: subprocess.run([p, '-c', 'id -u'], capture_output=True, timeout=1, stdin=subprocess.DEVNULL))\n    if r and r.stdout.strip() == b'0': escaped(p)",
    "device": "if attempt(os.mknod, 'dev', 0o600 | 0o020000, os.makedev(1, 1)) is None and os.path.exists('dev') and attempt(lambda: open('dev', 'rb').read(1)): escaped('device')",
    "keys": "libc = ctypes.CDLL(None)\nif libc.syscall(248, b'user', b'k', b'v', 1, -4) > 0: escaped('key')",
    "bpf": "libc = ctypes.CDLL(None); b = ctypes.create_string_buffer(128)\nif libc.syscall(321, 5, b, 128) >= 0: escaped('bpf')",
    "io_uring": "libc = ctypes.CDLL(None); b = ctypes.create_string_buffer(128)\nif libc.syscall(425, 4, b) >= 0: escaped('io_uring')",
    "i386 calls": "code = mmap.mmap(-1, 4096, prot=7); code.write(bytes.fromhex('b814000000cd80c3'))\nf = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))\nif f() > 0: escaped('int 0x80')",
}
_NETWORK = {
    "connect": "s = attempt(socket.create_connection, ('127.0.0.1', PORT), 1)\nif s: escaped('tcp')",
    "send a datagram": "s = attempt(socket.socket, socket.AF_INET, socket.SOCK_DGRAM)\nif s and attempt(s.sendto, b'x', ('127.0.0.1', PORT)): escaped('udp')",
    "abstract socket": "s = attempt(socket.socket, socket.AF_UNIX)\nif s and attempt(s.connect, '\\0ABSTRACT') is None and attempt(s.send, b'x'): escaped('unix')",
    "listen": "s = attempt(socket.create_server, ('127.0.0.1', 0))\nif s: escaped('listen')",
    "raw": "s = attempt(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)\nif s: escaped('raw')",
    "netlink": "s = attempt(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 0)\nif s: escaped('netlink')",
    "name look-up": "r = attempt(socket.getaddrinfo, 'example.com', 80)\nif r: escaped('dns')",
    "shell": "r = attempt(lambda: subprocess.run(['/bin/bash', '-c', 'echo x > /dev/tcp/127.0.0.1/PORT && echo sent'], capture_output=True, timeout=1))\nif r and b'sent' in r.stdout: escaped('bash')",
    "environment": "e = {k: v for k, v in os.environ.items() if 'SECRET' in k or 'KEY' in k}\nif e: escaped(e)",
    "memory of the runner": "import gc\nt = [o for o in gc.get_objects() if isinstance(o, dict) and 'expected' in o]\nif t: escaped(t)",
}


def programs() -> dict[str, str]:
    """Return the hostile programs by name; their names in capitals are not filled in yet."""
    found = {
        f"read {path}": f"t = attempt(lambda: open({path!r}, 'rb').read(32) if not os.path.isdir({path!r}) else os.listdir({path!r}))\nif t: escaped(t)"
        for path in _READS
    }
    found |= {
        f"write {path}": f"if attempt(lambda: open({path!r}, 'w').write('1') or 1): escaped('wrote')"
        for path in _WRITES
    }
    for kind in (_HANGS, _FLOODS, _PROCESSES, _SIGNALS, _LIMITS_PROGRAMS, _KERNEL, _NETWORK):
        found |= kind
    return {name: PRELUDE + code for name, code in found.items()}


def answers() -> dict[str, str]:
    """Return hostile responses to the presets that compare answers, by name."""
    found = {
        "power tower": "Answer: 9^{9^{9^{9}}}",
        "factorials": "Answer: " + "(" * 20 + "9" + "!)" * 20,
        "huge integer": "Answer: " + "9" * 400_000,
        "huge exponent": "Answer: 10^{10^{10}} - 10^{10^{9}}",
        "sum": "Answer: \\sum_{n=1}^{10^{12}} \\frac{\\sin n}{n}",
        "integral": "Answer: \\int_0^1 e^{e^{x^{x^{x}}}} \\, dx",
        "product": "Answer: \\prod_{n=1}^{10^{9}} (1 + x^n)",
        "nested roots": "Answer: " + "\\sqrt{2+" * 60 + "1" + "}" * 60,
        "nested fractions": "Answer: " + "\\frac{1}{1+" * 80 + "1" + "}" * 80,
        "expansion": "Answer: (x+y+z+w+u+v)^{200}",
        "polynomial": "Answer: " + "+".join(f"x^{{{n}}}" for n in range(300)),
        "open braces": "\\boxed{" * 100_000,
        "closed braces": "}" * 300_000,
        "boxes": "\\boxed{1} " * 50_000,
        "answer lines": "Answer: 1\n" * 50_000,
        "spaces": "Answer:" + " " * 400_000,
        "asterisks": "Answer: " + "*" * 200_000,
        "dollars": "$" * 200_000,
        "commas": "Answer: " + "1," * 100_000,
        "digits and commas": "Answer: " + "111,111," * 40_000,
        "matrix": "Answer: \\begin{pmatrix}" + "1 & 2 \\\\ " * 5_000 + "\\end{pmatrix}",
        "zero bytes": "Answer: \0" * 20_000,
        "right to left": "Answer: \u202e42\u202c",
        "surrogate": "Answer: \ud83d",
        "zalgo": "Answer: " + "4\u0301\u0302\u0303" * 50_000,
        "backslashes": "Answer: " + "\\" * 200_000,
        "trigonometry": "Answer: " + "\\sin(" * 60 + "x" + ")" * 60,
        "logarithms": "Answer: " + "\\log(" * 60 + "2" + ")" * 60,
        "limit": "Answer: \\lim_{x \\to 0} \\frac{\\sin(\\sin(\\sin(x)))-x}{x^{30}}",
        "equations": "Answer: " + " = ".join(f"x_{{{n}}}" for n in range(2_000)),
        "interval union": "Answer: " + " \\cup ".join(f"({n},{n + 1})" for n in range(500)),
        "set of sets": "Answer: " + "\\{" * 200 + "1" + "\\}" * 200,
        "absolute values": "Answer: " + "|" * 2_001,
        "division by zero": "Answer: \\frac{1}{0} + \\infty - \\infty",
        "binomials": "Answer: \\binom{10^{8}}{5 \\cdot 10^{7}}",
        "modulo": "Answer: 7^{7^{7^{7}}} \\bmod 1000",
        "mixed numbers": "Answer: " + "1 1/2 " * 40_000,
        "percent": "Answer: " + "50\\% " * 20_000,
        "base": "Answer: " + "1" * 100_000 + "_2",
        "words": "Answer: " + "and or " * 50_000,
        "code": "```python\n" * 30_000,
    }  # fmt: skip
    return found
