/* An MPI program that computes and writes by turns, as simulations do: every rank writes its part
 * of a step with MPI-IO (collectively into one shared file, or into a file of its own), then
 * computes. Rank 0 prints the seconds of each write phase, slowest rank.
 *
 * phases shared|own STEPS MIB GAP_MS DIR...    rank i uses the directory i (modulo their number) */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double compute_for(double seconds)
{
    double x = 1.0, end = MPI_Wtime() + seconds;
    /* Most of a real gap is spent in the processor; a little rest lets more ranks than cores
     * come to an end together. */
    while (MPI_Wtime() < end) {
        for (int i = 0; i < 1000; i++)
            x = x * 1.0000001 + 1e-9;
        nanosleep(&(struct timespec){0, 200000}, NULL);
    }
    return x;
}

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

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    int rank, ranks;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc < 6)
        MPI_Abort(MPI_COMM_WORLD, 2);
    int shared = strcmp(argv[1], "shared") == 0, steps = atoi(argv[2]), mib = atoi(argv[3]);
    double gap = atoi(argv[4]) / 1000.0, sink = 0;
    char path[4096];
    const char *dir = argv[5 + rank % (argc - 5)];
    if (shared)
        snprintf(path, sizeof path, "%s/mpi-shared", dir);
    else
        snprintf(path, sizeof path, "%s/mpi-%d", dir, rank);
    size_t bytes = (size_t)mib << 20;
    char *data = malloc(bytes);
    memset(data, 'a' + rank % 26, bytes);
    for (int step = 0; step < steps; step++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double begin = MPI_Wtime();
        MPI_File file;
        MPI_Comm comm = shared ? MPI_COMM_WORLD : MPI_COMM_SELF;
        must(MPI_File_open(comm, path, MPI_MODE_CREATE | MPI_MODE_WRONLY, MPI_INFO_NULL, &file), path);
        MPI_Offset at = shared ? (MPI_Offset)rank * (MPI_Offset)bytes : 0;
        must(MPI_File_write_at_all(file, at, data, (int)bytes, MPI_BYTE, MPI_STATUS_IGNORE), "write");
        must(MPI_File_close(&file), "close");
        double took = MPI_Wtime() - begin, slowest;
        MPI_Reduce(&took, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (rank == 0)
            printf("%.6f\n", slowest);
        sink += compute_for(gap);
    }
    if (sink < 0)
        puts("never");
    free(data);
    MPI_Finalize();
    return 0;
}
