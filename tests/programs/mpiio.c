/* MPI-IO as applications use it, each part verified by every rank: independent and collective
 * writes of interleaved records, data sieving (also beside plain writes), atomic mode, shared file
 * pointers, sizes.
 *   mpiio PART FILE
 * Every byte tells which rank wrote it at which offset, so that a byte in the wrong place shows. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank, size;

static void check(int rc, const char *what)
{
    if (rc != MPI_SUCCESS) {
        char text[MPI_MAX_ERROR_STRING];
        int n;
        MPI_Error_string(rc, text, &n);
        fprintf(stderr, "rank %d: %s: %s\n", rank, what, text);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

static unsigned char byte_of(int writer, MPI_Offset at, int round)
{
    return (unsigned char)(1 + (writer * 61 + at * 31 + (at >> 9) * 7 + round * 101) % 255);
}

static void expect(const unsigned char *got, MPI_Offset at, int len, int writer, int round,
                   const char *what)
{
    for (int i = 0; i < len; i++)
        if (got[i] != byte_of(writer, at + i, round)) {
            fprintf(stderr, "rank %d: %s: byte %lld of rank %d round %d is %d, not %d\n", rank, what,
                    (long long)(at + i), writer, round, got[i], byte_of(writer, at + i, round));
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
}

static MPI_File open_file(const char *path, int mode, MPI_Info info)
{
    MPI_File f;
    check(MPI_File_open(MPI_COMM_WORLD, path, mode, info, &f), "open");
    return f;
}

enum { RECORD = 47008, RECORDS = 20 };

/* Sync - barrier - sync, then everyone reads what everyone wrote through the open file. */
static void independent(const char *path)
{
    MPI_File f = open_file(path, MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL);
    unsigned char *buffer = malloc(RECORD);
    for (int round = 0; round < 2; round++) {
        for (int r = 0; r < RECORDS; r++) {
            MPI_Offset at = ((MPI_Offset)r * size + rank) * RECORD;
            for (int i = 0; i < RECORD; i++)
                buffer[i] = byte_of(rank, at + i, round);
            check(MPI_File_write_at(f, at, buffer, RECORD, MPI_BYTE, MPI_STATUS_IGNORE), "write");
        }
        check(MPI_File_sync(f), "sync");
        MPI_Barrier(MPI_COMM_WORLD);
        check(MPI_File_sync(f), "sync");
        for (int r = 0; r < RECORDS; r++)
            for (int w = 0; w < size; w++) {
                MPI_Offset at = ((MPI_Offset)r * size + w) * RECORD;
                check(MPI_File_read_at(f, at, buffer, RECORD, MPI_BYTE, MPI_STATUS_IGNORE), "read");
                expect(buffer, at, RECORD, w, round, "independent");
            }
        MPI_Barrier(MPI_COMM_WORLD);
    }
    check(MPI_File_close(&f), "close");
    free(buffer);
}

/* A strided view: block of `block` bytes for each rank in turn. `collective` chooses two-phase I/O;
 * independent access with data sieving reads, changes and writes back whole stretches under locks,
 * so that ranks touch each other's bytes. Closed, then opened anew by all. */
static void strided(const char *path, int collective, int block, int blocks)
{
    MPI_Info info;
    MPI_Info_create(&info);
    MPI_Info_set(info, "romio_ds_write", collective ? "disable" : "enable");
    MPI_Info_set(info, "romio_ds_read", collective ? "disable" : "enable");
    MPI_Info_set(info, "romio_cb_write", collective ? "enable" : "disable");
    MPI_Info_set(info, "romio_cb_read", collective ? "enable" : "disable");
    MPI_Datatype type;
    MPI_Type_vector(blocks, block, block * size, MPI_BYTE, &type);
    MPI_Type_commit(&type);
    int len = block * blocks;
    unsigned char *buffer = malloc(len);
    for (int round = 0; round < 2; round++) {
        MPI_File f = open_file(path, MPI_MODE_CREATE | MPI_MODE_RDWR, info);
        check(MPI_File_set_view(f, (MPI_Offset)rank * block, MPI_BYTE, type, "native", info), "view");
        for (int i = 0; i < len; i++) {
            MPI_Offset at = ((MPI_Offset)(i / block) * size + rank) * block + i % block;
            buffer[i] = byte_of(rank, at, round);
        }
        if (collective)
            check(MPI_File_write_all(f, buffer, len, MPI_BYTE, MPI_STATUS_IGNORE), "write_all");
        else
            check(MPI_File_write(f, buffer, len, MPI_BYTE, MPI_STATUS_IGNORE), "write");
        check(MPI_File_close(&f), "close");
        MPI_Barrier(MPI_COMM_WORLD);

        f = open_file(path, MPI_MODE_RDONLY, info);
        int whose = (rank + 1) % size;
        check(MPI_File_set_view(f, (MPI_Offset)whose * block, MPI_BYTE, type, "native", info), "view");
        memset(buffer, 0, len);
        if (collective)
            check(MPI_File_read_all(f, buffer, len, MPI_BYTE, MPI_STATUS_IGNORE), "read_all");
        else
            check(MPI_File_read(f, buffer, len, MPI_BYTE, MPI_STATUS_IGNORE), "read");
        for (int b = 0; b < blocks; b++)
            expect(buffer + b * block, ((MPI_Offset)b * size + whose) * block, block, whose, round,
                   collective ? "collective" : "sieving");
        check(MPI_File_close(&f), "close");
        MPI_Barrier(MPI_COMM_WORLD);
    }
    MPI_Type_free(&type);
    MPI_Info_free(&info);
    free(buffer);
}

/* Atomic mode: what a call wrote is seen by a read that the program orders after it. */
static void atomic(const char *path)
{
    MPI_File f = open_file(path, MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL);
    check(MPI_File_set_atomicity(f, 1), "atomicity");
    int n = 10000;
    unsigned char *buffer = malloc(n);
    for (int round = 0; round < 3 * size; round++) {
        int writer = round % size;
        if (rank == writer) {
            for (int i = 0; i < n; i++)
                buffer[i] = byte_of(writer, 500 + i, round);
            check(MPI_File_write_at(f, 500, buffer, n, MPI_BYTE, MPI_STATUS_IGNORE), "write");
        }
        MPI_Barrier(MPI_COMM_WORLD);
        check(MPI_File_read_at(f, 500, buffer, n, MPI_BYTE, MPI_STATUS_IGNORE), "read");
        expect(buffer, 500, n, writer, round, "atomic");
        MPI_Barrier(MPI_COMM_WORLD);
    }
    check(MPI_File_close(&f), "close");
    free(buffer);
}

#ifndef NO_SHARED_POINTERS /* libebb-mpi opens by name what could have them */
/* Shared file pointer: records land in some order, each exactly once and whole. */
static void shared_pointer(const char *path)
{
    enum { LEN = 1000, EACH = 25 };
    unsigned char record[LEN];
    MPI_File f = open_file(path, MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL);
    for (int r = 0; r < EACH; r++) {
        memset(record, 1 + rank, LEN);
        memcpy(record, &r, sizeof r);
        check(MPI_File_write_shared(f, record, LEN, MPI_BYTE, MPI_STATUS_IGNORE), "write_shared");
    }
    MPI_Barrier(MPI_COMM_WORLD); /* the ordered ones come after all others */
    memset(record, 101 + rank, LEN);
    check(MPI_File_write_ordered(f, record, LEN, MPI_BYTE, MPI_STATUS_IGNORE), "write_ordered");
    check(MPI_File_close(&f), "close");
    MPI_Barrier(MPI_COMM_WORLD);
    f = open_file(path, MPI_MODE_RDONLY, MPI_INFO_NULL);
    int *seen = calloc(size * EACH, sizeof *seen);
    for (int n = 0; n < size * EACH; n++) {
        int r;
        check(MPI_File_read_at(f, (MPI_Offset)n * LEN, record, LEN, MPI_BYTE, MPI_STATUS_IGNORE), "read");
        memcpy(&r, record, sizeof r);
        int w = record[LEN - 1] - 1, same = 1;
        for (int i = sizeof r; i < LEN; i++)
            same &= record[i] == w + 1;
        if (!same || w < 0 || w >= size || r < 0 || r >= EACH || seen[w * EACH + r]++) {
            fprintf(stderr, "rank %d: shared pointer: record %d is wrong\n", rank, n);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
    }
    for (int w = 0; w < size; w++) {
        MPI_Offset at = (MPI_Offset)(size * EACH + w) * LEN;
        check(MPI_File_read_at(f, at, record, LEN, MPI_BYTE, MPI_STATUS_IGNORE), "read");
        if (record[0] != 101 + w || record[LEN - 1] != 101 + w) {
            fprintf(stderr, "rank %d: ordered record %d is wrong\n", rank, w);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
    }
    check(MPI_File_close(&f), "close");
    free(seen);
}
#endif

/* Everybody writes one stretch plainly; then everybody rewrites its own half of every block, of
 * stretches that others have written plainly, by data sieving. No byte has two writers at a time. */
static void mixed(const char *path)
{
    enum { BLOCK = 200, BLOCKS = 100 };
    MPI_Info info;
    MPI_Info_create(&info);
    MPI_Info_set(info, "romio_ds_write", "enable");
    MPI_Info_set(info, "romio_cb_write", "disable");
    int len = BLOCK * BLOCKS;
    unsigned char *buffer = malloc((size_t)len * size);
    MPI_Datatype type;
    MPI_Type_vector(BLOCKS, BLOCK / 2, BLOCK * size, MPI_BYTE, &type);
    MPI_Type_commit(&type);
    for (int round = 0; round < 5; round++) {
        MPI_File f = open_file(path, MPI_MODE_CREATE | MPI_MODE_RDWR, info);
        MPI_Offset at = (MPI_Offset)rank * len;
        for (int i = 0; i < len; i++)
            buffer[i] = byte_of(rank, at + i, round);
        check(MPI_File_write_at(f, at, buffer, len, MPI_BYTE, MPI_STATUS_IGNORE), "write");
        MPI_Barrier(MPI_COMM_WORLD);
        /* The first half of each of this rank's blocks, all over the file. */
        check(MPI_File_set_view(f, (MPI_Offset)rank * BLOCK, MPI_BYTE, type, "native", info), "view");
        for (int i = 0; i < len / 2; i++) {
            MPI_Offset to = ((MPI_Offset)(i / (BLOCK / 2)) * size + rank) * BLOCK + i % (BLOCK / 2);
            buffer[i] = byte_of(rank + 50, to, round);
        }
        check(MPI_File_write(f, buffer, len / 2, MPI_BYTE, MPI_STATUS_IGNORE), "strided write");
        check(MPI_File_close(&f), "close");
        MPI_Barrier(MPI_COMM_WORLD);

        f = open_file(path, MPI_MODE_RDONLY, MPI_INFO_NULL);
        check(MPI_File_read_at(f, 0, buffer, len * size, MPI_BYTE, MPI_STATUS_IGNORE), "read");
        for (MPI_Offset b = 0; b < BLOCKS * size; b++) {
            MPI_Offset from = b * BLOCK;
            expect(buffer + from, from, BLOCK / 2, b % size + 50, round, "mixed, strided");
            from += BLOCK / 2;
            expect(buffer + from, from, BLOCK / 2, from / len, round, "mixed, plain");
        }
        check(MPI_File_close(&f), "close");
        MPI_Barrier(MPI_COMM_WORLD);
    }
    MPI_Type_free(&type);
    MPI_Info_free(&info);
    free(buffer);
}

/* What others have made of the size is seen after sync - barrier - sync, and kept by preallocation. */
static void sizes(const char *path)
{
    unsigned char buffer[1000];
    for (int round = 0; round < 8; round++) {
        MPI_File f = open_file(path, MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL);
        check(MPI_File_set_size(f, 0), "set_size");
        int writer = round % size;
        for (int i = 0; i < 1000; i++)
            buffer[i] = byte_of(writer, 5000 + i, round);
        if (rank == writer)
            check(MPI_File_write_at(f, 5000, buffer, 1000, MPI_BYTE, MPI_STATUS_IGNORE), "write");
        check(MPI_File_sync(f), "sync");
        MPI_Barrier(MPI_COMM_WORLD);
        check(MPI_File_sync(f), "sync");
        MPI_Offset end = -1, position = -1;
        check(MPI_File_get_size(f, &end), "get_size");
        check(MPI_File_seek(f, 0, MPI_SEEK_END), "seek");
        check(MPI_File_get_position(f, &position), "get_position");
        if (end != 6000 || position != 6000) {
            fprintf(stderr, "rank %d: round %d: size %lld, end %lld\n", rank, round, (long long)end,
                    (long long)position);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
        check(MPI_File_preallocate(f, 3000), "preallocate");
        MPI_Barrier(MPI_COMM_WORLD);
        check(MPI_File_sync(f), "sync");
        MPI_Barrier(MPI_COMM_WORLD);
        check(MPI_File_sync(f), "sync");
        check(MPI_File_close(&f), "close");
        MPI_Barrier(MPI_COMM_WORLD);
        f = open_file(path, MPI_MODE_RDONLY, MPI_INFO_NULL);
        check(MPI_File_get_size(f, &end), "get_size");
        memset(buffer, 0, sizeof buffer);
        check(MPI_File_read_at(f, 5000, buffer, 1000, MPI_BYTE, MPI_STATUS_IGNORE), "read");
        expect(buffer, 5000, 1000, writer, round, "preallocated");
        if (end != 6000)
            MPI_Abort(MPI_COMM_WORLD, 1);
        check(MPI_File_close(&f), "close");
        MPI_Barrier(MPI_COMM_WORLD);
    }
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    const char *part = argc == 3 ? argv[1] : "", *path = argv[argc - 1];
    if (!strcmp(part, "independent"))
        independent(path);
    else if (!strcmp(part, "collective"))
        strided(path, 1, 1000, 200);
    else if (!strcmp(part, "sieving"))
        strided(path, 0, 100, 200);
    else if (!strcmp(part, "atomic"))
        atomic(path);
    else if (!strcmp(part, "mixed"))
        mixed(path);
    else if (!strcmp(part, "sizes"))
        sizes(path);
#ifndef NO_SHARED_POINTERS
    else if (!strcmp(part, "shared"))
        shared_pointer(path);
#endif
    else {
        fprintf(stderr, "usage: mpiio independent|collective|sieving|mixed|atomic|shared|sizes FILE\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    MPI_Finalize();
    return 0;
}
