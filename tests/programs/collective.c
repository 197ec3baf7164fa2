/* Collective calls of MPI-IO, with what they promise checked by every rank: what was written is there for all after one
 * MPI_File_sync, sizes are what was set, modes and errors are as ever.
 *   collective FILE         checks, and leaves FILE with the last round
 *   collective FILE count   one call of each kind; before and after each it writes a line and waits for one
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RECORD = 3000, RECORDS = 5 };
static int rank, size;

static void fail(const char *what, const char *why)
{
    fprintf(stderr, "rank %d: %s: %s\n", rank, what, why);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static void check(int rc, const char *what)
{
    char text[MPI_MAX_ERROR_STRING];
    int n;
    if (rc == MPI_SUCCESS)
        return;
    MPI_Error_string(rc, text, &n);
    fail(what, text);
}

static void fails(int rc, int with, const char *what)
{
    int class = MPI_SUCCESS;
    if (rc != MPI_SUCCESS)
        MPI_Error_class(rc, &class);
    if (class != with)
        fail(what, rc == MPI_SUCCESS ? "works" : "fails with another error");
}

static unsigned char byte_of(MPI_Offset at, int round)
{
    return (unsigned char)(1 + (at * 37 + (at >> 8) * 11 + round * 101) % 255);
}

static void write_records(MPI_File f, int round)
{
    static unsigned char data[RECORD];
    for (int r = 0; r < RECORDS; r++) {
        MPI_Offset at = ((MPI_Offset)r * size + rank) * RECORD;
        for (int i = 0; i < RECORD; i++)
            data[i] = byte_of(at + i, round);
        check(MPI_File_write_at(f, at, data, RECORD, MPI_BYTE, MPI_STATUS_IGNORE), "write");
    }
}

static void read_all(MPI_File f, int round, const char *what)
{
    static unsigned char data[RECORD];
    for (int r = 0; r < RECORDS * size; r++) {
        MPI_Offset at = (MPI_Offset)r * RECORD;
        MPI_Status status;
        int n;
        check(MPI_File_read_at(f, at, data, RECORD, MPI_BYTE, &status), "read");
        MPI_Get_count(&status, MPI_BYTE, &n);
        if (n != RECORD)
            fail(what, "a record is short");
        for (int i = 0; i < RECORD; i++)
            if (data[i] != byte_of(at + i, round))
                fail(what, "a byte is wrong");
    }
    /* Nobody writes again before all have read. */
    MPI_Barrier(MPI_COMM_WORLD);
}

static void has_size(MPI_File f, MPI_Offset want, const char *what)
{
    MPI_Offset len;
    check(MPI_File_get_size(f, &len), "get_size");
    if (len != want)
        fail(what, "the size is another one");
}

static MPI_File opened(MPI_Comm comm, const char *path, int amode)
{
    MPI_File f;
    check(MPI_File_open(comm, path, amode, MPI_INFO_NULL, &f), path);
    return f;
}

static void checks(const char *path)
{
    const MPI_Offset whole = (MPI_Offset)RECORD * RECORDS * size;
    char other[4096];
    int amode = MPI_MODE_CREATE | MPI_MODE_EXCL | MPI_MODE_RDWR, got;
    MPI_File f = opened(MPI_COMM_WORLD, path, amode), g;
    check(MPI_File_get_amode(f, &got), "get_amode");
    if (got != amode)
        fail("get_amode", "another mode");
    for (int round = 0; round < 3; round++) {
        write_records(f, round);
        check(MPI_File_sync(f), "sync");
        read_all(f, round, "after the sync");
    }
    check(MPI_File_preallocate(f, 2 * whole), "preallocate");
    check(MPI_File_sync(f), "sync");
    has_size(f, 2 * whole, "preallocate");
    read_all(f, 2, "after preallocate");
    check(MPI_File_preallocate(f, whole), "preallocate less");
    check(MPI_File_sync(f), "sync");
    has_size(f, 2 * whole, "preallocate less");
    check(MPI_File_set_size(f, whole + 5), "set_size");
    check(MPI_File_sync(f), "sync");
    has_size(f, whole + 5, "set_size");
    check(MPI_File_set_size(f, whole), "set_size");
    check(MPI_File_close(&f), "close");

    fails(MPI_File_open(MPI_COMM_WORLD, path, amode, MPI_INFO_NULL, &f), MPI_ERR_FILE_EXISTS, "open anew");
    f = opened(MPI_COMM_WORLD, path, MPI_MODE_RDONLY);
    has_size(f, whole, "opened again");
    read_all(f, 2, "opened again");
    check(MPI_File_sync(f), "sync of what is only read");
    check(MPI_File_close(&f), "close");

    /* Two files at a time, of all and of some. */
    MPI_Comm some;
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &some);
    snprintf(other, sizeof other, "%s.%d", path, rank % 2);
    f = opened(MPI_COMM_WORLD, path, MPI_MODE_WRONLY | MPI_MODE_CREATE);
    g = opened(some, other, MPI_MODE_RDWR | MPI_MODE_CREATE | MPI_MODE_DELETE_ON_CLOSE);
    check(MPI_File_set_size(g, 77), "set_size of the other");
    write_records(f, 3);
    check(MPI_File_sync(f), "sync of what is only written");
    check(MPI_File_sync(g), "sync of the other");
    has_size(g, 77, "the other");
    check(MPI_File_close(&g), "close of the other");
    check(MPI_File_close(&f), "close");
    MPI_Barrier(MPI_COMM_WORLD);
    fails(MPI_File_open(some, other, MPI_MODE_RDONLY, MPI_INFO_NULL, &g), MPI_ERR_NO_SUCH_FILE,
          "open what was deleted");
    MPI_Comm_free(&some);

    MPI_Offset at;
    f = opened(MPI_COMM_WORLD, path, MPI_MODE_RDWR | MPI_MODE_APPEND);
    check(MPI_File_get_position(f, &at), "get_position");
    if (at != whole)
        fail("opened to append", "it is not at the end");
    check(MPI_File_sync(f), "sync of what is appended to");
    check(MPI_File_close(&f), "close");
    fails(MPI_File_open(MPI_COMM_WORLD, path, MPI_MODE_RDONLY | MPI_MODE_CREATE, MPI_INFO_NULL, &f),
          MPI_ERR_AMODE, "open with modes that do not go together");

    f = opened(MPI_COMM_SELF, path, MPI_MODE_RDONLY);
    read_all(f, 3, "opened by each alone");
    check(MPI_File_close(&f), "close");
}

/* Whoever counts looks between two phases. */
static void phase(const char *what)
{
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) {
        printf("%s\n", what);
        fflush(stdout);
        if (getchar() == EOF)
            fail(what, "nobody counts");
    }
    MPI_Barrier(MPI_COMM_WORLD);
}

static void one_of_each(const char *path)
{
    const MPI_Offset whole = (MPI_Offset)RECORD * RECORDS * size;
    MPI_Offset len;
    phase("begin");
    MPI_File f = opened(MPI_COMM_WORLD, path, MPI_MODE_CREATE | MPI_MODE_RDWR);
    phase("open creating");
    write_records(f, 0);
    phase("write");
    check(MPI_File_sync(f), "sync");
    phase("sync");
    check(MPI_File_set_size(f, whole + 100000), "set_size");
    phase("set_size");
    check(MPI_File_preallocate(f, whole + 2000000), "preallocate");
    phase("preallocate");
    check(MPI_File_get_size(f, &len), "get_size");
    phase("get_size");
    check(MPI_File_close(&f), "close");
    phase("close");
    f = opened(MPI_COMM_WORLD, path, MPI_MODE_RDWR);
    phase("open existing");
    check(MPI_File_close(&f), "close");
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (argc == 3 && !strcmp(argv[2], "count"))
        one_of_each(argv[1]);
    else if (argc == 2)
        checks(argv[1]);
    else
        fail("usage", "collective FILE [count]");
    MPI_Finalize();
    return 0;
}
