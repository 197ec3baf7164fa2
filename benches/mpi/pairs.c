/* A pair of MPI programs: one writes a file for each step, the other reads each of them once and compares every
 * byte. Both use MPI-IO collectively, with noncontiguous parts of each rank, so that data goes in two phases.
 *
 * pairs produce|consume particles|patches STEPS MIB marks|plain DIR...    rank i uses the directory i (modulo their
 * number)
 *
 * particles: eight variables, one after the other, of each of which every rank has a part.
 * patches:   a plane of bytes, of which every rank has a tile.
 * marks:     a file is synced, and a second one made that says that it is there; the reader looks for that a thousand
 *            times a second, and removes both. plain: the reader opens it, and that is all.
 *
 * Prints "began SECONDS" or "ended SECONDS", as of CLOCK_MONOTONIC. */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { VARIABLES = 8, COLUMNS = 16384 };

static void must(int code, const char *what)
{
    if (code == MPI_SUCCESS)
        return;
    char text[MPI_MAX_ERROR_STRING];
    int len;
    MPI_Error_string(code, text, &len);
    fprintf(stderr, "%s: %s\n", what, text);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static void fail(const char *what)
{
    fprintf(stderr, "%s\n", what);
    MPI_Abort(MPI_COMM_WORLD, 2);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* A part of the file that is in one piece: where, and how long. */
struct piece {
    uint64_t at, len;
};

static struct piece *pieces;
static int count;

static void add(uint64_t at, uint64_t len)
{
    pieces = realloc(pieces, sizeof *pieces * (size_t)(count + 1));
    pieces[count++] = (struct piece){at, len};
}

static void divide(const char *shape, uint64_t size, int rank, int ranks)
{
    if (strcmp(shape, "particles") == 0) {
        uint64_t variable = size / VARIABLES, part = variable / (uint64_t)ranks;
        for (uint64_t v = 0; v < VARIABLES; v++)
            add(v * variable + (uint64_t)rank * part, part);
        return;
    }
    int dims[2] = {0, 0};
    MPI_Dims_create(ranks, 2, dims);
    uint64_t rows = size / COLUMNS / (uint64_t)dims[0], columns = COLUMNS / (uint64_t)dims[1];
    uint64_t top = (uint64_t)(rank / dims[1]) * rows, left = (uint64_t)(rank % dims[1]) * columns;
    for (uint64_t row = 0; row < rows; row++)
        add((top + row) * COLUMNS + left, columns);
}

static uint64_t word(uint64_t offset, int step)
{
    return (offset / 8 + 1) * 0x9E3779B97F4A7C15u + (uint64_t)step;
}

/* Fills it, or compares; true when all is right. */
static int content(uint64_t *data, int step, int check)
{
    for (int p = 0; p < count; p++)
        for (uint64_t at = 0; at < pieces[p].len; at += 8, data++) {
            uint64_t want = word(pieces[p].at + at, step);
            if (check && *data != want)
                return 0;
            *data = want;
        }
    return 1;
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    int rank, ranks;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc < 7)
        fail("pairs produce|consume particles|patches STEPS MIB marks|plain DIR...");
    int produces = strcmp(argv[1], "produce") == 0, steps = atoi(argv[3]);
    int marks = strcmp(argv[5], "marks") == 0;
    const char *dir = argv[6 + rank % (argc - 6)];
    divide(argv[2], (uint64_t)atoi(argv[4]) << 20, rank, ranks);

    uint64_t bytes = 0;
    int *lens = malloc(sizeof *lens * (size_t)count);
    MPI_Aint *places = malloc(sizeof *places * (size_t)count);
    for (int p = 0; p < count; p++) {
        lens[p] = (int)pieces[p].len;
        places[p] = (MPI_Aint)pieces[p].at;
        bytes += pieces[p].len;
    }
    MPI_Datatype view;
    MPI_Type_create_hindexed(count, lens, places, MPI_BYTE, &view);
    MPI_Type_commit(&view);
    uint64_t *data = malloc(bytes);

    MPI_Barrier(MPI_COMM_WORLD);
    if (produces && rank == 0)
        printf("began %.6f\n", now());
    for (int step = 0; step < steps; step++) {
        char path[4096], mark[4100];
        snprintf(path, sizeof path, "%s/step%d", dir, step);
        snprintf(mark, sizeof mark, "%s.is", path);
        struct stat there;
        if (produces)
            content(data, step, 0);
        else if (marks && rank == 0)
            while (stat(mark, &there) != 0)
                usleep(1000);
        if (!produces && marks)
            MPI_Barrier(MPI_COMM_WORLD);
        int mode = produces ? MPI_MODE_CREATE | MPI_MODE_WRONLY : MPI_MODE_RDONLY;
        MPI_File file;
        must(MPI_File_open(MPI_COMM_WORLD, path, mode, MPI_INFO_NULL, &file), path);
        must(MPI_File_set_view(file, 0, MPI_BYTE, view, "native", MPI_INFO_NULL), "view");
        if (produces)
            must(MPI_File_write_all(file, data, (int)bytes, MPI_BYTE, MPI_STATUS_IGNORE), "write");
        else
            must(MPI_File_read_all(file, data, (int)bytes, MPI_BYTE, MPI_STATUS_IGNORE), "read");
        if (produces && marks)
            must(MPI_File_sync(file), "sync");
        must(MPI_File_close(&file), "close");
        if (!produces && !content(data, step, 1))
            fail("other bytes than were written");
        if (!marks)
            continue;
        MPI_Barrier(MPI_COMM_WORLD);
        if (produces && rank == 0) {
            FILE *made = fopen(mark, "w");
            if (made == NULL || fclose(made) != 0)
                fail(mark);
        }
        if (!produces && rank == 0 && (unlink(path) != 0 || unlink(mark) != 0))
            fail(path);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (!produces && rank == 0)
        printf("ended %.6f\n", now());
    MPI_Type_free(&view);
    MPI_Finalize();
    return 0;
}
