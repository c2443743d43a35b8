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


# ------------------------------------------------- Hostile programs in C++, and texts that are hostile to the compiler

# $NAME is filled by battery.py.  Numbers of system calls are those of x86-64.  A program prints ESCAPED for what it could
# do, and what it could read.

HEAD = """
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>
#include <sys/mman.h>
#include <sys/resource.h>
static long call(long n, long a = 0, long b = 0, long c = 0, long d = 0, long e = 0) {
  long r; register long r10 asm("r10") = d; register long r8 asm("r8") = e;
  asm volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8) : "rcx", "r11", "memory");
  return r;
}
static void attempt(long n, long a = 0, long b = 0, long c = 0, long d = 0, long e = 0) {
  if (call(n, a, b, c, d, e) >= 0) printf("ESCAPED by %ld\\n", n);
}
static void show(const char *path) {
  char text[4096]; int fd = open(path, O_RDONLY);
  if (fd >= 0) { long n = read(fd, text, sizeof text - 1); if (n > 0) { text[n] = 0; puts(text); } close(fd); }
}
"""

CPP_PROGRAMS = {
    "cpp_calls": "int main() { char room[256] = {}; long p = (long)room; int one[2] = {1, 1};\n"
    "attempt(41, 2, 1); attempt(41, 16, 3); attempt(41, 1, 1); attempt(41, 17, 3);"  # sockets
    "attempt(101, 16, getppid()); attempt(101, 16, $VICTIM); attempt(310, $VICTIM, p, 1, p, 1);"  # ptrace, memory
    "attempt(311, getppid(), p, 1, p, 1); attempt(434, $VICTIM); attempt(129, $VICTIM, 9, p);"
    "attempt(272, 0x10000000); attempt(272, 0x20000); attempt(308, 0); attempt(165, (long)\"none\", (long)\"/box/own\", (long)\"tmpfs\");"
    "attempt(166, (long)\"/box/own\", 2); attempt(155, (long)\".\", (long)\".\"); attempt(161, (long)\".\");"
    "attempt(105, 0); attempt(117, 0, 0, 0); attempt(126, (long)one, p); attempt(321, 0, p, 128); attempt(425, 8, p);"
    "attempt(323, 1); attempt(298, p, 0, -1, -1); attempt(319, (long)\"x\"); attempt(29, 77, 4096, 01666);"
    "attempt(160, 9, p); attempt(302, 0, 9, p); attempt(203, $VICTIM, 8, p); attempt(141, 0, $VICTIM, 19);"
    "attempt(322, -100, (long)\"/bin/true\"); attempt(157, 4, 1); attempt(135, 0x40000); attempt(112); }",
    "cpp_files": 'int main() { show("/etc/passwd"); show("/etc/shadow"); show("$SECRET"); show("/proc/self/environ");\n'
    'show("/proc/1/environ"); show("/proc/$VICTIM/environ"); show("/sys/kernel/mm/transparent_hugepage/enabled");\n'
    'char path[] = "../../../../../../../../..$SECRET"; show(path);\n'
    'if (symlink("$SECRET", "link") == 0) show("link"); if (link("$SECRET", "hard") == 0) puts("ESCAPED");\n'
    'if (open("$DIRECTORY/mine", O_CREAT | O_WRONLY, 0600) >= 0 || open("/usr/mine", O_CREAT | O_WRONLY, 0600) >= 0 || '
    'open("/mine", O_CREAT | O_WRONLY, 0600) >= 0 || unlink("$SECRET") == 0 || truncate("$SECRET", 0) == 0) puts("ESCAPED"); }',
    "cpp_environment": "extern char **environ; int main() { for (char **e = environ; *e; ++e) puts(*e);\n"
    "for (int fd = 3; fd < 64; ++fd) if (fcntl(fd, F_GETFD) >= 0) puts(\"ESCAPED\"); }",
    "cpp_parent_memory": 'int main() { char path[64]; snprintf(path, sizeof path, "/proc/%d/mem", getppid());\n'
    'if (open(path, O_RDWR) >= 0 || open("/dev/mem", O_RDWR) >= 0) puts("ESCAPED"); }',
    "cpp_signals": "int main() { for (int n = 1; n < 65; ++n) if (n != 9) call(62, 1, n); call(62, $VICTIM, 9); call(62, $VICTIM, 19);\n"
    "call(62, getppid(), 9); usleep(100000); exit(7); }",
    "cpp_fork_bomb": "int main() { for (;;) { if (call(57) >= 0 || call(58) >= 0 || call(56, 17) >= 0 || fork() >= 0) write(1, \"ESCAPED\", 7); } }",
    "cpp_thread_bomb": "static void *stay(void *) { sleep(60); return 0; }\n"
    "int main() { pthread_t t; int n = 0; while (!pthread_create(&t, 0, stay, 0)) ++n; printf(\"%d\\n\", n); fflush(stdout); _exit(0); }",
    "cpp_memory_bomb": "int main() { for (;;) { void *p = malloc(1 << 24); if (!p) return 3; memset(p, 1, 1 << 24); } }",
    "cpp_static_array": "static volatile char a[1L << 28]; int main() { for (long i = 0; i < 1L << 28; i += 4096) a[i] = 1; puts(\"ESCAPED\"); }",
    "cpp_disk_bomb": "int main() { static char block[1 << 20]; int n = 0; for (;; ++n) { char name[16]; sprintf(name, \"%d\", n);\n"
    "int fd = open(name, O_CREAT | O_WRONLY, 0600); if (fd < 0 || write(fd, block, sizeof block) < (long)sizeof block) break; close(fd); }\n"
    "printf(\"%d\\n\", n); }",
    "cpp_output_bomb": "int main() { for (;;) puts(\"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\"); }",
    "cpp_endless_loop": "int main() { signal(SIGXCPU, SIG_IGN); for (volatile int i = 0;; ++i); }",
    "cpp_sleeps": "int main() { sigset_t all; sigfillset(&all); sigprocmask(SIG_BLOCK, &all, 0); for (;;) sleep(60); }",
    "cpp_calls_of_32_bit": "int main() { puts(\"begun\"); fflush(stdout); long r; asm volatile(\"int $$0x80\" : \"=a\"(r) : \"a\"(20));\n"
    "puts(\"ESCAPED\"); }",
    "cpp_forged_status": "int main() { const char *s = \"{\\\"status\\\": 0, \\\"cpu_s\\\": 0, \\\"peak_bytes\\\": 0, \\\"stopped_for\\\": \\\"\\\", "
    "\\\"error\\\": \\\"\\\"}\"; for (int fd = 3; fd < 64; ++fd) if (write(fd, s, strlen(s)) > 0) puts(\"ESCAPED\"); _exit(7); }",
    "cpp_another_program": 'int main() { char *none[] = {0}; char *words[] = {(char *)"sh", (char *)"-c", '
    '(char *)"cat /etc/passwd $SECRET; echo x > $DIRECTORY/mine; exec 3<>/dev/tcp/127.0.0.1/$TCP; (sleep 60 &)", 0};\n'
    'execve("/bin/sh", words, none); return 0; }',
}  # fmt: skip

# Texts that are to harm the compiler, or to make it tell.
TEXTS = {
    "cpp_includes_passwd": '#include "/etc/passwd"\n#include "$SECRET"\nint main() {}',
    "cpp_includes_proc": '#include "/proc/self/environ"\n#include "/proc/self/maps"\nint main() {}',
    "cpp_embeds_a_file": 'asm(".section .rodata\\nsecret: .incbin \\"$SECRET\\"\\n.byte 0\\n.text");\n'
    "#include <cstdio>\nextern char secret[]; int main() { puts(secret); }",
    "cpp_includes_a_device": '#include "/dev/zero"\nint main() {}',
    "cpp_includes_itself": '#include __FILE__\nint main() {}',
    "cpp_endless_templates": "template <int N> struct F { typedef typename F<N - 1>::t a; typedef typename F<N - 2>::t b; typedef F<a::v + b::v + N> t;"
    " enum { v = N }; };\nint main() { return F<800>::t::v; }",
    "cpp_endless_constant": "constexpr long f(long n) { return n < 2 ? n : f(n - 1) + f(n - 2); }\nstatic_assert(f(60) > 0, \"\");\nint main() {}",
    "cpp_initialised_array": "int a[1L << 30] = {1};\nint main() { return a[5]; }",
    "cpp_assembler_bomb": 'asm(".fill 0x40000000, 8, 1");\nint main() {}',
}  # fmt: skip

CPP_STOPPED = {
    "cpp_output_bomb": ("output",), "cpp_endless_loop": ("time",), "cpp_sleeps": ("time",), "cpp_fork_bomb": ("time", "output"),
}  # fmt: skip
CPP_STATUS = {"cpp_signals": 7, "cpp_forged_status": 7}
CPP_AT_MOST = {"cpp_thread_bomb": 64, "cpp_disk_bomb": 9}
