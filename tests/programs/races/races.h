/* What the planted programs share: one file, small accesses, and a word when something fails. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define NEEDS(what)                                                   \
    do {                                                              \
        if (!(what)) {                                                \
            fprintf(stderr, "%s:%d: %s failed\n", __FILE__, __LINE__, #what); \
            exit(9);                                                  \
        }                                                             \
    } while (0)

static const char *path;

static int opened(int flags)
{
    int fd = open(path, flags, 0644);
    NEEDS(fd >= 0);
    return fd;
}

static void put(int fd, off_t at, size_t n, char c)
{
    char bytes[4096];
    NEEDS(n <= sizeof bytes);
    memset(bytes, c, n);
    NEEDS(pwrite(fd, bytes, n, at) == (ssize_t)n);
}

/* The first byte; 0 where there is none. */
static char get(int fd, off_t at, size_t n)
{
    char bytes[4096] = {0};
    NEEDS(n <= sizeof bytes);
    NEEDS(pread(fd, bytes, n, at) >= 0);
    return bytes[0];
}

static inline void write_close(void)
{
    int fd = opened(O_RDWR | O_CREAT);
    put(fd, 0, 10, 'x');
    close(fd);
}

static inline void lock(int fd, short kind, off_t at, off_t n)
{
    struct flock l = {.l_type = kind, .l_whence = SEEK_SET, .l_start = at, .l_len = n};
    NEEDS(fcntl(fd, F_SETLKW, &l) == 0);
}
