/*
 * Two processes on two nodes write halves of a checkpoint and read each other's edge, with the
 * primitives: who wrote says when it may be seen, who reads says when it looks.
 *
 *     cc halo.c -o halo $(pkg-config --cflags --libs libebb)
 *     ./halo MOUNT/file 0     and, on another node,     ./halo MOUNT/file 1
 */
#include <ebb.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define HALF (1 << 20)
#define EDGE 4096

static void check(int fine, const char *what)
{
    if (!fine) {
        fprintf(stderr, "%s: %s\n", what, strerror(errno));
        exit(1);
    }
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    uint64_t mine = strcmp(argv[2], "0") ? HALF : 0;
    uint64_t edge = mine ? HALF - EDGE : HALF; /* of the other one */
    int fd = ebb_open(argv[1], O_RDWR | O_CREAT, 0644);
    check(fd >= 0, "open");

    char *data = malloc(HALF);
    check(data != NULL, "memory");
    memset(data, mine ? 'b' : 'a', HALF);
    check(ebb_write(fd, data, HALF, mine) == HALF, "write");
    check(ebb_attach(fd, mine, HALF) == 0, "attach");

    /* A program would use its own messages here; this one asks until the other half is there. */
    struct ebb_owner owner;
    for (int tries = 0;; tries++) {
        ssize_t n = ebb_query(fd, edge, EDGE, &owner, 1);
        check(n >= 0 && tries < 600, "query");
        if (n == 1 && owner.offset == edge && owner.len == EDGE)
            break;
        usleep(50000);
    }
    check(ebb_read(fd, data, EDGE, edge, owner.node) == EDGE, "read");
    for (int i = 0; i < EDGE; i++)
        check(data[i] == (mine ? 'a' : 'b'), "the other's edge");
    check(ebb_flush(fd, mine, HALF) == 0, "flush");
    check(ebb_close(fd) == 0, "close");
    free(data);
    puts("the edge of the other half is right");
    return 0;
}
