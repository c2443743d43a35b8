"""Hostile programs in C++, and texts that are hostile to the compiler.

$NAME is filled by battery.py.  Numbers of system calls are those of x86-64.  A program prints ESCAPED for what it could
do, and what it could read.
"""

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

PROGRAMS = {
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

STOPPED = {
    "cpp_output_bomb": ("output",), "cpp_endless_loop": ("time",), "cpp_sleeps": ("time",), "cpp_fork_bomb": ("time", "output"),
}  # fmt: skip
STATUS = {"cpp_signals": 7, "cpp_forged_status": 7}
AT_MOST = {"cpp_thread_bomb": 64, "cpp_disk_bomb": 9}
