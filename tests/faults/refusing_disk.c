/* A disk that refuses for a while: system calls on paths below $REFUSING_BELOW fail while the file $REFUSING exists.
 *
 * Preloaded (LD_PRELOAD) into every process of a run.  The file holds an errno and the kinds of calls that fail, such as
 * "5 open,read"; kinds: open (to read) create (open to write) read write fsync rename stat list unlink mkdir.  Calls are
 * counted in $REFUSING.count, a byte each.  What glibc calls inside itself is not seen: fopen of C code, the relative names that fts walks. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* The errno with which a call of this kind is to fail now; 0: none. */
static int refused_now(const char *kind) {
  const char *file = getenv("REFUSING");
  char text[128] = {0}, *kinds;
  int descriptor, number;
  if (!file || (descriptor = syscall(SYS_openat, AT_FDCWD, file, O_RDONLY | O_CLOEXEC, 0)) < 0) return 0;
  syscall(SYS_read, descriptor, text, sizeof text - 1);
  syscall(SYS_close, descriptor);
  number = strtol(text, &kinds, 10);
  if (!number || !strstr(kinds, kind)) return 0;
  char count[PATH_MAX];
  snprintf(count, sizeof count, "%s.count", file);
  if ((descriptor = syscall(SYS_openat, AT_FDCWD, count, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644)) >= 0) {
    syscall(SYS_write, descriptor, kind, 1);
    syscall(SYS_close, descriptor);
  }
  return number;
}

static int is_below(const char *path) {
  const char *root = getenv("REFUSING_BELOW");
  size_t length = root ? strlen(root) : 0;
  return length && !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

/* Name of an open file; "": none. */
static void name_of(int descriptor, char name[PATH_MAX]) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, name, PATH_MAX - 1);
  name[length > 0 ? length : 0] = 0;
}

static int refuses_at(const char *kind, int directory, const char *path) {
  char name[PATH_MAX], whole[2 * PATH_MAX];
  if (!path) return 0;
  if (path[0] != '/') {
    if (directory == AT_FDCWD) {
      if (syscall(SYS_getcwd, name, sizeof name) <= 0) return 0;
    } else name_of(directory, name);
    snprintf(whole, sizeof whole, "%s%s%s", name, path[0] ? "/" : "", path);
    path = whole;
  }
  int number = is_below(path) ? refused_now(kind) : 0;
  if (number) errno = number;
  return number;
}
static int refuses(const char *kind, const char *path) { return refuses_at(kind, AT_FDCWD, path); }
static int refuses_open(const char *kind, int descriptor) {
  char name[PATH_MAX];
  name_of(descriptor, name);
  return name[0] == '/' && refuses(kind, name);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define ON_PATH(result, failed, kind, name, declared, passed, path) \
  result name declared { if (refuses(kind, path)) return failed; return REAL(name) passed; }
#define ON_OPEN(result, kind, name, declared, passed) \
  result name declared { if (refuses_open(kind, file)) return -1; return REAL(name) passed; }
#define ON_AT(name, kind, declared, passed) \
  int name declared { if (refuses_at(kind, at, path)) return -1; return REAL(name) passed; }
static const char *kind_of(int flags) {
  return flags & O_DIRECTORY ? "list" : (flags & O_ACCMODE) == O_RDONLY ? "open" : "create";
}
#define OPENS(name) int name(const char *path, int flags, ...) { \
  va_list more; va_start(more, flags); int mode = va_arg(more, int); va_end(more); \
  return refuses(kind_of(flags), path) ? -1 : REAL(name)(path, flags, mode); }
#define OPENS_AT(name) int name(int at, const char *path, int flags, ...) { \
  va_list more; va_start(more, flags); int mode = va_arg(more, int); va_end(more); \
  return refuses_at(kind_of(flags), at, path) ? -1 : REAL(name)(at, path, flags, mode); }

OPENS(open)
OPENS(open64)
OPENS_AT(openat)
OPENS_AT(openat64)
ON_PATH(FILE *, NULL, "open", fopen, (const char *path, const char *mode), (path, mode), path)
ON_PATH(FILE *, NULL, "open", fopen64, (const char *path, const char *mode), (path, mode), path)
ON_PATH(DIR *, NULL, "list", opendir, (const char *path), (path), path)
ON_PATH(int, -1, "rename", rename, (const char *path, const char *to), (path, to), path)
ON_PATH(int, -1, "rename", link, (const char *path, const char *to), (path, to), path)
ON_PATH(int, -1, "unlink", unlink, (const char *path), (path), path)
ON_PATH(int, -1, "unlink", rmdir, (const char *path), (path), path)
ON_PATH(int, -1, "mkdir", mkdir, (const char *path, mode_t mode), (path, mode), path)
ON_PATH(int, -1, "stat", stat, (const char *path, struct stat *state), (path, state), path)
ON_PATH(int, -1, "stat", stat64, (const char *path, struct stat64 *state), (path, state), path)
ON_PATH(int, -1, "stat", lstat, (const char *path, struct stat *state), (path, state), path)
ON_PATH(int, -1, "stat", lstat64, (const char *path, struct stat64 *state), (path, state), path)
ON_PATH(int, -1, "stat", access, (const char *path, int mode), (path, mode), path)
ON_PATH(int, -1, "stat", chmod, (const char *path, mode_t mode), (path, mode), path)
ON_AT(unlinkat, "unlink", (int at, const char *path, int flags), (at, path, flags))
ON_AT(mkdirat, "mkdir", (int at, const char *path, mode_t mode), (at, path, mode))
ON_AT(fstatat, "stat", (int at, const char *path, struct stat *state, int flags), (at, path, state, flags))
ON_AT(fstatat64, "stat", (int at, const char *path, struct stat64 *state, int flags), (at, path, state, flags))
ON_AT(utimensat, "stat", (int at, const char *path, const struct timespec times[2], int flags), (at, path, times, flags))
ON_AT(linkat, "rename", (int at, const char *path, int to_at, const char *to, int flags), (at, path, to_at, to, flags))
ON_AT(renameat, "rename", (int at, const char *path, int to_at, const char *to), (at, path, to_at, to))
ON_AT(renameat2, "rename", (int at, const char *path, int to_at, const char *to, unsigned flags),
      (at, path, to_at, to, flags))
ON_AT(statx, "stat", (int at, const char *path, int flags, unsigned mask, struct statx *state),
      (at, path, flags, mask, state))
ON_OPEN(int, "stat", fstat, (int file, struct stat *state), (file, state))
ON_OPEN(int, "stat", fstat64, (int file, struct stat64 *state), (file, state))
ON_OPEN(int, "fsync", fsync, (int file), (file))
ON_OPEN(int, "fsync", fdatasync, (int file), (file))
ON_OPEN(ssize_t, "read", read, (int file, void *to, size_t bytes), (file, to, bytes))
ON_OPEN(ssize_t, "read", pread, (int file, void *to, size_t bytes, off_t at), (file, to, bytes, at))
ON_OPEN(ssize_t, "read", pread64, (int file, void *to, size_t bytes, off64_t at), (file, to, bytes, at))
ON_OPEN(ssize_t, "write", write, (int file, const void *from, size_t bytes), (file, from, bytes))
ON_OPEN(ssize_t, "write", pwrite, (int file, const void *from, size_t bytes, off_t at), (file, from, bytes, at))
ON_OPEN(ssize_t, "write", pwrite64, (int file, const void *from, size_t bytes, off64_t at), (file, from, bytes, at))
ON_OPEN(ssize_t, "write", writev, (int file, const struct iovec *parts, int count), (file, parts, count))
ON_OPEN(ssize_t, "write", pwritev, (int file, const struct iovec *parts, int count, off_t at), (file, parts, count, at))
ON_OPEN(ssize_t, "write", pwritev64, (int file, const struct iovec *parts, int count, off64_t at),
        (file, parts, count, at))
ON_OPEN(int, "write", ftruncate, (int file, off_t length), (file, length))
ON_OPEN(int, "write", ftruncate64, (int file, off64_t length), (file, length))
