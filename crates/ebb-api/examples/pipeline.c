/*
 * A pipeline: workers on any nodes put their parts of each step, readers on any nodes get each step once, when all of
 * its parts are there. Nobody sends a message, and nothing of it gets to the backing.
 *
 *     cc pipeline.c -o pipeline $(pkg-config --cflags --libs libebb)
 *     ./pipeline MOUNT/dir put RANK RANKS     and, on any node,     ./pipeline MOUNT/dir get READERS
 */
#include <ebb.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STEPS = 5, PART = 300000, RANKS_MAX = 64 };

static void check(int fine, const char *what)
{
    if (!fine) {
        fprintf(stderr, "%s: %s\n", what, strerror(errno));
        exit(1);
    }
}

int main(int argc, char **argv)
{
    if (argc < 4)
        return 2;
    int exchange = ebb_exchange(argv[1], "producers=1 consumers=1 wait=60s");
    check(exchange >= 0, argv[1]);
    uint32_t number = (uint32_t)atoi(argv[argc - 1]), rank = (uint32_t)atoi(argv[3]);
    char *data = malloc((size_t)PART * RANKS_MAX);
    check(data != NULL, "memory");
    uint64_t bytes = 0;
    for (int step = 0; step < STEPS; step++) {
        char name[32];
        snprintf(name, sizeof name, "step%d", step);
        if (strcmp(argv[2], "put") == 0) {
            memset(data, 'a' + step, PART);
            check(ebb_put(exchange, name, data, PART, (uint64_t)rank * PART, number) == 0, name);
            continue;
        }
        ssize_t n = ebb_get(exchange, name, data, (size_t)PART * RANKS_MAX, 0, number);
        check(n > 0, name);
        for (ssize_t i = 0; i < n; i++)
            check(data[i] == 'a' + step, "other bytes than were put");
        bytes += (uint64_t)n;
    }
    free(data);
    if (bytes > 0)
        printf("%llu bytes are right\n", (unsigned long long)bytes);
    return 0;
}
