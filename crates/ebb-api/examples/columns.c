/*
 * A matrix of which each process has some columns: many small pieces of a shared file, in one call; and
 * a handle, by which another node opens the file.
 *
 *     ./columns MOUNT/file            writes every second column, prints a handle
 *     ./columns MOUNT HANDLE          opens that, writes the others, reads all of them
 */
#include <ebb.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROWS 500
#define COLUMNS 20

static double matrix[ROWS][COLUMNS];

static void check(int fine, const char *what)
{
    if (!fine) {
        fprintf(stderr, "%s: %s\n", what, strerror(errno));
        exit(1);
    }
}

/* Pieces of the columns from `first` on, every `step`th. */
static size_t pieces_of(struct ebb_piece *pieces, int first, int step)
{
    size_t n = 0;
    for (int row = 0; row < ROWS; row++)
        for (int column = first; column < COLUMNS; column += step)
            pieces[n++] = (struct ebb_piece){
                .offset = sizeof(double) * (row * COLUMNS + column),
                .data = &matrix[row][column],
                .len = sizeof(double),
            };
    return n;
}

int main(int argc, char **argv)
{
    static struct ebb_piece pieces[ROWS * COLUMNS];
    unsigned char handle[EBB_HANDLE_SIZE];
    int second = argc == 3, fd;
    if (second) {
        for (int i = 0; i < EBB_HANDLE_SIZE; i++)
            check(sscanf(argv[2] + 2 * i, "%2hhx", &handle[i]) == 1, "handle");
        fd = ebb_handle_open(argv[1], handle, O_RDWR);
    } else {
        fd = ebb_open(argv[1], O_RDWR | O_CREAT, 0644);
    }
    check(fd >= 0, "open");
    for (int row = 0; row < ROWS; row++)
        for (int column = second; column < COLUMNS; column += 2)
            matrix[row][column] = row + column / 100.0;
    size_t n = pieces_of(pieces, second, 2);
    check(ebb_writex(fd, pieces, n) == (ssize_t)(n * sizeof(double)), "write");
    check(ebb_attach_file(fd) == 0, "attach");
    if (second) {
        check(ebb_query_file(fd, NULL, 0) > 0, "query");
        memset(matrix, 0, sizeof matrix);
        n = pieces_of(pieces, 0, 1);
        check(ebb_readx(fd, pieces, n, NULL) == sizeof matrix, "read");
        for (int row = 0; row < ROWS; row++)
            for (int column = 0; column < COLUMNS; column++)
                check(matrix[row][column] == row + column / 100.0, "an element");
        puts("all columns are right");
    } else {
        check(ebb_handle_get(fd, handle) == 0, "handle");
        for (int i = 0; i < EBB_HANDLE_SIZE; i++)
            printf("%02x", handle[i]);
        puts("");
    }
    check(ebb_close(fd) == 0, "close");
    return 0;
}
