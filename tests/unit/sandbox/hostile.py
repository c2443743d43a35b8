"""Programs that try to get out of the sandbox, or to harm the node.  Each prints ESCAPED where it can tell by itself.

$NAME is filled by battery.py: what it watches from outside.  Numbers of system calls are those of x86-64.
"""

PRELUDE = """
import ctypes, os, sys, time, signal, threading, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *arguments)
    print("ESCAPED" if result >= 0 else "refused", number)
    return result
def attempt(action):
    try:
        result = action()
    except BaseException as error:
        print("refused", type(error).__name__)
        return None
    print("ESCAPED")
    return result
def effect(action):
    try:
        return action()
    except BaseException as error:
        print("refused", type(error).__name__)
"""

PROGRAMS = {
    # What is outside.
    "tcp": "effect(lambda: socket.create_connection(('127.0.0.1', $TCP), 1))",
    "udp": "effect(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', $UDP)))",
    "tcp_by_raw_call": "call(41, 2, 1, 0)",
    "abstract_socket": "effect(lambda: socket.socket(socket.AF_UNIX).connect('\\0$ABSTRACT'))",
    "unix_socket": "effect(lambda: socket.socket(socket.AF_UNIX).connect('$UNIX'))",
    "netlink": "call(41, 16, 3, 0)",
    "packet_socket": "call(41, 17, 3, 0)",
    "vsock": "call(41, 40, 1, 0)",
    "read_file": "print(effect(lambda: open('$SECRET').read()))",
    "read_file_by_openat2": "print(call(437, -100, b'$SECRET', (ctypes.c_uint64 * 3)(), 24))",
    "read_file_by_handle": "call(304, -100, (ctypes.c_char * 64)(), 0)",
    "read_shadow": "print(effect(lambda: open('/etc/shadow').read())); print(effect(lambda: open('/etc/passwd').read()))",
    "list_directory": "print(effect(lambda: os.listdir('$DIRECTORY')))",
    "write_file": "effect(lambda: open('$DIRECTORY/mine', 'w').write('x'))",
    "change_file": "effect(lambda: open('$SECRET', 'a').write('x'))",
    "truncate_file": "effect(lambda: os.truncate('$SECRET', 0))",
    "change_mode": "effect(lambda: os.chmod('$SECRET', 0o777))",
    "remove_file": "effect(lambda: os.remove('$SECRET'))",
    "rename_over": "open('a', 'w').write('x') if os.access('.', os.W_OK) else 0; effect(lambda: os.rename('a', '$SECRET'))",
    "hard_link": "effect(lambda: os.link('$SECRET', 'link')); print(effect(lambda: open('link').read()))",
    "symbolic_link": "effect(lambda: os.symlink('$SECRET', 'link')); print(effect(lambda: open('link').read()))",
    "parent_directories": "print(effect(lambda: open('../' * 20 + '$SECRET'[1:]).read()))",
    "write_system": "attempt(lambda: open('/usr/mine', 'w')); attempt(lambda: open('/usr/bin/env', 'a'))",
    "write_interpreter": "attempt(lambda: open(os.path.join(os.path.dirname(os.__file__), 'os.py'), 'a'))",
    "write_root": "attempt(lambda: open('/mine', 'w')); attempt(lambda: os.mkdir('/dev/mine'))",
    "own_environment": "print(dict(os.environ)); print(effect(lambda: open('/proc/self/environ').read()))",
    "parent_environment": "print(effect(lambda: open('/proc/%d/environ' % os.getppid()).read())); "
    "print(effect(lambda: open('/proc/$VICTIM/environ').read()))",
    "environment_in_memory": "ctypes.c_char_p.in_dll(libc, 'program_invocation_name'); "
    "p = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, 'environ'); i = 0\nwhile p and p[i]: print(p[i]); i += 1",
    "proc": "attempt(lambda: os.listdir('/proc')); attempt(lambda: open('/proc/self/maps'))",
    "sys": "attempt(lambda: open('/sys/kernel/mm/transparent_hugepage/enabled')); attempt(lambda: os.listdir('/sys/fs'))",
    "parent_memory": "attempt(lambda: open('/proc/%d/mem' % os.getppid(), 'r+b'))",
    "old_descriptors": "[attempt(lambda: os.fstat(fd)) for fd in range(3, 64)]",
    # Other processes.
    "ptrace_parent": "call(101, 16, os.getppid(), 0, 0); call(101, 16, $VICTIM, 0, 0)",
    "process_vm_readv": "call(310, $VICTIM, 0, 0, 0, 0, 0)",
    "process_vm_writev": "call(311, os.getppid(), 0, 0, 0, 0, 0)",
    "kill_victim": "effect(lambda: os.kill($VICTIM, 9)); libc.kill($VICTIM, 9)",
    "stop_victim": "effect(lambda: os.kill($VICTIM, signal.SIGSTOP))",
    "kill_parent": "effect(lambda: os.kill(os.getppid() or 1, 9)); effect(lambda: os.kill(1, 9)); time.sleep(0.1)",
    "interrupt_init": "[effect(lambda: os.kill(1, n)) for n in range(1, 65) if n != 9]",
    "kill_all": "effect(lambda: os.kill(-1, 9)); effect(lambda: os.killpg(0, 9)); effect(lambda: os.killpg(1, 9))",
    "signal_by_descriptor": "import fcntl\na, b = os.pipe()\n"
    "[effect(lambda: fcntl.fcntl(a, *words)) for words in ((8, $VICTIM), (10, 9), (4, 0o20000))]\n"
    "os.write(b, b'x'); time.sleep(0.1)",
    "grow_pipe": "import fcntl\nattempt(lambda: fcntl.fcntl(os.pipe()[1], 1031, 1 << 20))",
    "change_times": "effect(lambda: os.utime('$SECRET', (1, 1)))",
    "queue_signal": "call(129, $VICTIM, 9, (ctypes.c_char * 128)())",
    "pidfd": "call(434, $VICTIM, 0); call(434, os.getppid(), 0)",
    "limits_of_others": "call(302, $VICTIM, 7, (ctypes.c_uint64 * 2)(1, 1), 0); call(302, 0, 7, (ctypes.c_uint64 * 2)(9, 9), 0)",
    "raise_own_limits": "import resource\nattempt(lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)))",
    "priority": "effect(lambda: os.setpriority(os.PRIO_PROCESS, $VICTIM, 19)); effect(lambda: os.setpriority(2, os.getuid(), 19)); "
    "attempt(lambda: os.nice(1))",
    "affinity": "attempt(lambda: os.sched_setaffinity($VICTIM, {0}))",
    "real_time": "attempt(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))",
    # Leaving, or gaining.
    "fork": "attempt(os.fork)",
    "vfork_by_raw_call": "call(58)",
    "clone_a_process": "call(56, 17, 0, 0, 0, 0)",
    "clone3_a_process": "call(435, (ctypes.c_uint64 * 11)(0, 0, 0, 0, 17), 88)",
    "execute": "attempt(lambda: os.execv('/bin/sh', ['sh', '-c', 'echo ESCAPED']))",
    "subprocess": "import subprocess\nattempt(lambda: subprocess.run(['/bin/echo', 'ESCAPED']))",
    "execveat": "call(322, -100, b'/bin/true', 0, 0, 0)",
    "setsid": "attempt(os.setsid)",
    "process_group": "attempt(lambda: os.setpgid(0, 0))",
    "user_namespace": "call(272, 0x10000000)",
    "mount_namespace": "call(272, 0x20000)",
    "clone_into_namespace": "call(56, 0x10000000 | 17, 0, 0, 0, 0)",
    "setns": "call(308, 0, 0)",
    "mount": "call(165, b'none', b'/box/own', b'tmpfs', 0, 0)",
    "remount": "call(165, b'none', b'/usr', 0, 32 | 4096, 0)",
    "unmount": "call(166, b'/box/own', 2)",
    "new_mount_calls": "call(428, -100, b'/', 1); call(430, b'tmpfs', 0); call(442, -100, b'/usr', 0, (ctypes.c_uint64 * 4)(), 32)",
    "pivot_root": "call(155, b'.', b'.')",
    "chroot": "attempt(lambda: os.chroot('.')); call(161, b'/')",
    "mknod": "attempt(lambda: os.mknod('disk', 0o60600, os.makedev(8, 0))); attempt(lambda: os.mkfifo('fifo'))",
    "set_user": "attempt(lambda: os.setuid(0)); attempt(lambda: os.setresuid(0, 0, 0)); attempt(lambda: os.setgroups([0]))",
    "set_uid_bit": "effect(lambda: open('own', 'w').close()); effect(lambda: os.chmod('own', 0o6777)); "
    "attempt(lambda: os.execv('/usr/bin/su', ['su']))",
    "capabilities": "call(126, (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[0xffffffff] * 6))",
    "keyring": "call(250, 0, -3, 1); call(248, b'user', b'name', b'value', 5, -3); call(249, b'user', b'n', 0, 0)",
    "bpf": "call(321, 0, (ctypes.c_char * 128)(), 128)",
    "perf": "call(298, (ctypes.c_char * 128)(), 0, -1, -1, 0)",
    "io_uring": "call(425, 8, (ctypes.c_char * 256)())",
    "userfaultfd": "call(323, 1)",
    "memory_file": "attempt(lambda: os.memfd_create('x'))",
    "inotify": "call(294, 0); call(300, 0, 0)",
    "module": "call(175, 0, 0, b''); call(313, 0, b'', 0); call(246, 0, 0, 0, 0)",
    "reboot": "call(169, 0xfee1dead, 672274793, 0, 0)",
    "host_name": "call(170, b'mine', 4); call(171, b'mine', 4)",
    "clock": "call(227, 0, (ctypes.c_int64 * 2)(1, 1)); call(159, 0)",
    "sysv_memory": "call(29, 77, 4096, 0o1666)",
    "sysv_queues": "call(68, 77, 0o1666); call(64, 77, 1, 0o1666)",
    "posix_queue": "call(240, b'mine', 0o102, 0o666, 0)",
    "times_of_a_device": "[attempt(lambda: os.utime('/dev/' + name)) for name in ('null', 'zero', 'random')]; "
    "open('/dev/null', 'w').write('x')",
    "mode_of_a_device": "[attempt(lambda: os.chmod('/dev/' + name, 0o666)) for name in ('null', 'zero', 'random')]",
    "descriptors_in_flight": "import array\na, b = socket.socketpair()\n"
    "attempt(lambda: a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [1] * 200))]))",
    "terminal_input": "import fcntl\n[attempt(lambda: fcntl.ioctl(fd, 0x5412, b'x')) for fd in range(3)]",
    "new_filter": "call(317, 1, 0, 0); call(157, 22, 2, 0, 0, 0)",
    "dumpable_again": "call(157, 4, 1, 0, 0, 0)",
    "keep_after_parent": "call(157, 1, 0, 0, 0, 0)",
    "personality": "call(135, 0x0040000)",
    "x32_calls": "print('begun', flush=True); libc.syscall(ctypes.c_long(0x40000000 + 39)); print('ESCAPED')",
    "calls_of_32_bit": "import mmap\nprint('begun', flush=True)\ncode = mmap.mmap(-1, 4096, prot=7)\n"
    "code.write(bytes.fromhex('b814000000cd80c3'))\n"  # mov eax, 20 (getpid of 32 bit); int 0x80; ret
    "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))(); print('ESCAPED')",
    # The result.
    "forged_status": 'answer = b\'{"status": 0, "cpu_s": 0, "peak_bytes": 0, "stopped_for": "", "error": ""}\'\n'
    "for fd in range(64):\n    if fd not in (1, 2): effect(lambda: os.write(fd, answer)); effect(lambda: socket.socket(fileno=fd).send(answer))\n"
    "os._exit(7)",
    "code_of_the_server": "import gc, types\n[setattr(module, 'STOP', b'') for module in list(sys.modules.values()) if hasattr(module, 'STOP')]\nos._exit(7)",
    "exit_from_a_thread": "threading.Thread(target=lambda: os._exit(7)).start(); time.sleep(60)",
    "closed_outputs": "os.close(1); os.close(2); os._exit(7)",
    "changed_input": "effect(lambda: os.ftruncate(0, 0)); effect(lambda: os.pwrite(0, b'forged', 0)); attempt(lambda: os.write(os.open('/dev/fd/0', 1), b'forged'))",
    # Too much.
    "fork_bomb": "while True: effect(os.fork)",
    "thread_bomb": "threading.stack_size(65536); n = 0\ndef stay(): time.sleep(60)\ntry:\n"
    "    while True: threading.Thread(target=stay, daemon=True).start(); n += 1\n"
    "except BaseException: print(n, flush=True); os._exit(0)",
    "memory_bomb": "blocks = []\nwhile True: blocks.append(bytearray(1 << 24))",
    "mapped_memory_bomb": "import mmap\nblocks = []\nwhile True: blocks.append(mmap.mmap(-1, 1 << 24)); blocks[-1].write(b'x' * (1 << 24))",
    "disk_bomb": "n = 0\ntry:\n    while True: open(str(n), 'wb').write(b'x' * (1 << 20)); n += 1\nexcept OSError: print(n)",
    "sparse_file": "attempt(lambda: os.truncate(open('a', 'w').name, 1 << 40))",
    "inode_bomb": "n = 0\ntry:\n    while True: open(str(n), 'w').close(); n += 1\nexcept OSError: print(n)",
    "descriptor_bomb": "n = 0\ntry:\n    while True: os.dup(0); n += 1\nexcept OSError: print(n)",
    "pipe_bomb": "n = 0\ntry:\n    while True: os.pipe(); n += 1\nexcept OSError: print(n)",
    "output_bomb": "while True: print('x' * 10000)",
    "error_bomb": "while True: sys.stderr.write('x' * 10000)",
    "big_integer": "print(len(str(7 ** 7 ** 7 ** 7)))",
    "endless_loop": "while True: pass",
    "ignores_the_limit": "signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
    "sleeps": "signal.alarm(0); time.sleep(60)",
    "blocks_all_signals": "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); time.sleep(60)",
    "waits_for_input": "sys.stdin.read(); os.read(os.pipe()[0], 1)",
    "stops_itself": "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)",
    "crashes": "ctypes.string_at(0)",
    "recursion": "sys.setrecursionlimit(10 ** 9)\ndef f(): return f()\nf()",
}

STOPPED = {
    "output_bomb": ("output",), "error_bomb": ("output", "time"), "endless_loop": ("time",),
    "ignores_the_limit": ("time",), "sleeps": ("time",), "blocks_all_signals": ("time",), "waits_for_input": ("time",),
    "stops_itself": ("time",), "fork_bomb": ("time", "output"),
}  # fmt: skip
STATUS = {"forged_status": 7, "code_of_the_server": 7, "exit_from_a_thread": 7, "closed_outputs": 7}
AT_MOST = {"thread_bomb": 64, "disk_bomb": 9, "inode_bomb": 1100, "descriptor_bomb": 64, "pipe_bomb": 32}
