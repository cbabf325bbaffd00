/* Faults in the file operations of a process: libc's functions, as TensorFlow, HDF5 and Python call them.

   gcc -shared -fPIC -o file_faults.so file_faults.c -ldl;  LD_PRELOAD=./file_faults.so python ...

   file_faults_arm(directory, at, mode, before) counts operations below a directory from 0. Before each it calls `before`,
   which may copy the directory: what a kill at that moment would leave. Mode 1: operation `at` fails with EIO. Mode 2: all
   that write fail with ENOSPC from `at` on. Data that stdio has in its buffers is not on the disk, as after a kill. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

typedef void (*before_fn)(long number, const char *kind, const char *path, int writes);

static char directory[PATH_MAX];
static long at, count;
static int mode = -1;
static before_fn before;
static __thread int is_busy;

void file_faults_arm(const char *path, long number, int how, before_fn call) {
  snprintf(directory, sizeof directory, "%s", path ? path : "");
  at = number, mode = path ? how : -1, before = call, count = 0;
}

static int fault(const char *kind, const char *path, int writes) {
  size_t length = strlen(directory);
  if (mode < 0 || is_busy || !path || strncmp(path, directory, length) || (path[length] && path[length] != '/')) return 0;
  long number = count++;
  if (before) is_busy = 1, before(number, kind, path, writes), is_busy = 0;
  if (mode == 1 && number == at) return errno = EIO;
  if (mode == 2 && number >= at && writes) return errno = ENOSPC;
  return 0;
}

static int descriptor_fault(const char *kind, int descriptor, int writes) {
  char link[64], path[PATH_MAX];
  if (mode < 0 || is_busy) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return fault(kind, path, writes);
}

#define REAL(type, name, ...) \
  static type (*real)(__VA_ARGS__); \
  if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    REAL(int, #name, const char *, int, ...); \
    va_list rest; va_start(rest, flags); mode_t bits = va_arg(rest, mode_t); va_end(rest); \
    int writes = (flags & O_ACCMODE) != O_RDONLY; \
    return fault(writes ? "create" : "open", path, writes) ? -1 : real(path, flags, bits); \
  }
OPEN(open) OPEN(open64)

#define FOPEN(name) \
  FILE *name(const char *path, const char *how) { \
    REAL(FILE *, #name, const char *, const char *); \
    int writes = *how != 'r'; \
    return fault(writes ? "create" : "open", path, writes) ? NULL : real(path, how); \
  }
FOPEN(fopen) FOPEN(fopen64)

#define PATH(name, kind, writes) \
  int name(const char *path) { \
    REAL(int, #name, const char *); \
    return fault(kind, path, writes) ? -1 : real(path); \
  }
PATH(unlink, "unlink", 0) PATH(rmdir, "rmdir", 0)

int mkdir(const char *path, mode_t bits) {
  REAL(int, "mkdir", const char *, mode_t);
  return fault("mkdir", path, 1) ? -1 : real(path, bits);
}
int rename(const char *source, const char *target) {
  REAL(int, "rename", const char *, const char *);
  return fault("rename", source, 0) ? -1 : real(source, target);
}
size_t fwrite(const void *data, size_t size, size_t number, FILE *file) {
  REAL(size_t, "fwrite", const void *, size_t, size_t, FILE *);
  return descriptor_fault("write", fileno(file), 1) ? 0 : real(data, size, number, file);
}
int fflush(FILE *file) {
  REAL(int, "fflush", FILE *);
  return file && descriptor_fault("flush", fileno(file), 1) ? EOF : real(file);
}
ssize_t write(int descriptor, const void *data, size_t size) {
  REAL(ssize_t, "write", int, const void *, size_t);
  return descriptor_fault("write", descriptor, 1) ? -1 : real(descriptor, data, size);
}
#define PWRITE(name) \
  ssize_t name(int descriptor, const void *data, size_t size, off_t offset) { \
    REAL(ssize_t, #name, int, const void *, size_t, off_t); \
    return descriptor_fault("write", descriptor, 1) ? -1 : real(descriptor, data, size, offset); \
  }
PWRITE(pwrite) PWRITE(pwrite64)
#define TRUNCATE(name) \
  int name(int descriptor, off_t size) { \
    REAL(int, #name, int, off_t); \
    return descriptor_fault("truncate", descriptor, 1) ? -1 : real(descriptor, size); \
  }
TRUNCATE(ftruncate) TRUNCATE(ftruncate64)
int fsync(int descriptor) {
  REAL(int, "fsync", int);
  return descriptor_fault("fsync", descriptor, 0) ? -1 : real(descriptor);
}
