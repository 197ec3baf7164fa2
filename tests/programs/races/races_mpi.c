/*
 * Small MPI programs, each with a race or without one: `races_mpi NAME FILE`. Rank 0 mostly writes the
 * first ten bytes, rank 1 reads them. A reader that must have something new says so: with EXPECT set
 * in the environment a read that does not show it ends the program with status 3.
 */
#include "races.h"
#include <mpi.h>

static int rank, size;

static void barrier(void)
{
    MPI_Barrier(MPI_COMM_WORLD);
}

static void want(int fd, char c)
{
    char got = get(fd, 0, 10);
    if (getenv("EXPECT") && got != c) {
        fprintf(stderr, "rank %d reads %d instead of %d\n", rank, got, c);
        MPI_Abort(MPI_COMM_WORLD, 3);
    }
}

/* Rank 0 writes and closes; `order` is what comes between; `reader` opens and reads. */
static void open_read(void)
{
    int fd = opened(O_RDWR | O_CREAT);
    want(fd, 'x');
    close(fd);
}

/* -- no order at all */

static void plain_unordered(void)
{
    int fd = opened(O_RDWR | O_CREAT);
    put(fd, 0, 10, 'x');
    close(fd);
}

static void overlap_by_one(void)
{
    int fd = opened(O_RDWR | O_CREAT);
    put(fd, rank * 100, 101, 'x');
    close(fd);
}

static void disjoint(void)
{
    int fd = opened(O_RDWR | O_CREAT);
    put(fd, rank * 100, 100, 'x');
    close(fd);
}

static void only_reads(void)
{
    int fd = opened(O_RDWR | O_CREAT);
    get(fd, 0, 10);
    close(fd);
}

static void truncate_against_write(void)
{
    int fd = opened(O_RDWR | O_CREAT);
    if (rank == 0)
        put(fd, 0, 10, 'x');
    else
        NEEDS(ftruncate(fd, 5) == 0);
    close(fd);
}

static void all_truncate(void)
{
    int fd = opened(O_RDWR | O_CREAT | O_TRUNC);
    put(fd, rank * 10, 10, 'x');
    close(fd);
}

static void root_truncates(void)
{
    if (rank == 0)
        close(opened(O_RDWR | O_CREAT | O_TRUNC));
    barrier();
    int fd = opened(O_RDWR);
    put(fd, rank * 10, 10, 'x');
    close(fd);
}

/* -- a barrier between, and more or less of what models ask for */

static void barrier_only(void)
{
    int fd = opened(O_RDWR | O_CREAT);
    get(fd, 4000, 1);
    barrier();
    if (rank == 0)
        put(fd, 0, 10, 'x');
    barrier();
    if (rank == 1)
        want(fd, 'x');
    barrier();
    close(fd);
}

static void fsync_barrier(void)
{
    int fd = opened(O_RDWR | O_CREAT);
    barrier();
    if (rank == 0) {
        put(fd, 0, 10, 'x');
        fsync(fd);
    }
    barrier();
    if (rank == 1)
        want(fd, 'x');
    barrier();
    close(fd);
}

static void fsync_barrier_fsync(void)
{
    int fd = opened(O_RDWR | O_CREAT);
    barrier();
    if (rank == 0) {
        put(fd, 0, 10, 'x');
        fsync(fd);
    }
    barrier();
    if (rank == 1) {
        fdatasync(fd);
        want(fd, 'x');
    }
    barrier();
    close(fd);
}

static void close_barrier_open(void)
{
    if (rank == 0)
        write_close();
    barrier();
    if (rank == 1)
        open_read();
}

static void close_barrier(void)
{
    int fd = opened(O_RDWR | O_CREAT);
    barrier();
    if (rank == 0) {
        put(fd, 0, 10, 'x');
        close(fd);
    }
    barrier();
    if (rank == 1) {
        want(fd, 'x');
        close(fd);
    }
}

static void close_after_barrier(void)
{
    int fd = rank == 0 ? opened(O_RDWR | O_CREAT) : -1;
    if (rank == 0)
        put(fd, 0, 10, 'x');
    barrier();
    if (rank == 1)
        open_read();
    barrier();
    if (rank == 0)
        close(fd);
}

static void fsync_after_barrier(void)
{
    int fd = opened(O_RDWR | O_CREAT);
    barrier();
    if (rank == 0)
        put(fd, 0, 10, 'x');
    barrier();
    if (rank == 0)
        fsync(fd);
    else
        want(fd, 'x');
    barrier();
    close(fd);
}

static void read_then_overwrite(void)
{
    int fd = opened(O_RDWR | O_CREAT);
    if (rank == 1)
        get(fd, 0, 10);
    barrier();
    if (rank == 0)
        put(fd, 0, 10, 'x');
    close(fd);
}

static void overwrite(void)
{
    if (rank == 0)
        write_close();
    barrier();
    if (rank == 1)
        write_close();
}

static void overwrite_unseen(void)
{
    int fd = opened(O_RDWR | O_CREAT);
    barrier();
    if (rank == 0) {
        put(fd, 0, 10, 'x');
        fsync(fd);
    }
    barrier();
    if (rank == 1)
        put(fd, 0, 10, 'y');
    close(fd);
}

static void steps(void)
{
    for (int step = 0; step < 3; step++) {
        int fd = opened(O_RDWR | O_CREAT);
        if (rank == 0)
            put(fd, step * 10, 10, 'x');
        if (rank == 1 && step > 0)
            get(fd, (step - 1) * 10, 10);
        close(fd);
        barrier();
    }
}

/* -- messages */

static void message(void)
{
    int word = 0;
    if (rank == 0) {
        write_close();
        MPI_Send(&word, 1, MPI_INT, 1, 7, MPI_COMM_WORLD);
    } else {
        MPI_Recv(&word, 1, MPI_INT, 0, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        open_read();
    }
}

static void message_wrong_way(void)
{
    int word = 0;
    if (rank == 0) {
        write_close();
        MPI_Recv(&word, 1, MPI_INT, 1, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else {
        MPI_Send(&word, 1, MPI_INT, 0, 7, MPI_COMM_WORLD);
        open_read();
    }
}

static void message_later(void)
{
    int word = 0;
    MPI_Request request;
    if (rank == 0) {
        write_close();
        MPI_Isend(&word, 1, MPI_INT, 1, 7, MPI_COMM_WORLD, &request);
    } else {
        MPI_Irecv(&word, 1, MPI_INT, 0, 7, MPI_COMM_WORLD, &request);
    }
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    if (rank == 1)
        open_read();
}

static void message_not_awaited(void)
{
    int word = 0;
    MPI_Request request;
    if (rank == 0) {
        write_close();
        MPI_Isend(&word, 1, MPI_INT, 1, 7, MPI_COMM_WORLD, &request);
    } else {
        MPI_Irecv(&word, 1, MPI_INT, 0, 7, MPI_COMM_WORLD, &request);
        close(opened(O_RDWR | O_CREAT));
        int fd = opened(O_RDWR);
        get(fd, 0, 10);
        close(fd);
    }
    MPI_Wait(&request, MPI_STATUS_IGNORE);
}

static void message_from_anybody(void)
{
    int word = 0;
    if (rank == 0) {
        write_close();
        MPI_Send(&word, 1, MPI_INT, 1, 9, MPI_COMM_WORLD);
    } else {
        MPI_Recv(&word, 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        open_read();
    }
}

static void message_too_early(void)
{
    int word = 0;
    for (int i = 0; i < 2; i++) {
        if (rank == 0) {
            if (i == 1)
                write_close();
            MPI_Send(&word, 1, MPI_INT, 1, 7, MPI_COMM_WORLD);
        } else {
            MPI_Recv(&word, 1, MPI_INT, 0, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            int fd = opened(O_RDWR | O_CREAT);
            if (i == 0)
                get(fd, 0, 10);
            close(fd);
        }
    }
}

static void second_message_first(void)
{
    int words[2] = {0};
    MPI_Request requests[2];
    if (rank == 0) {
        MPI_Send(words, 1, MPI_INT, 1, 7, MPI_COMM_WORLD);
        write_close();
        MPI_Send(words, 1, MPI_INT, 1, 7, MPI_COMM_WORLD);
    } else {
        for (int i = 0; i < 2; i++)
            MPI_Irecv(&words[i], 1, MPI_INT, 0, 7, MPI_COMM_WORLD, &requests[i]);
        MPI_Wait(&requests[1], MPI_STATUS_IGNORE);
        open_read();
        MPI_Wait(&requests[0], MPI_STATUS_IGNORE);
    }
}

static void requests_kept(void)
{
    int word = 0;
    MPI_Request request;
    if (rank == 0)
        MPI_Send_init(&word, 1, MPI_INT, 1, 7, MPI_COMM_WORLD, &request);
    else
        MPI_Recv_init(&word, 1, MPI_INT, 0, 7, MPI_COMM_WORLD, &request);
    for (int i = 0; i < 2; i++) {
        if (rank == 0 && i == 1)
            write_close();
        MPI_Start(&request);
        MPI_Wait(&request, MPI_STATUS_IGNORE);
    }
    if (rank == 1)
        open_read();
    MPI_Request_free(&request);
}

static void passed_on(void)
{
    int word = 0;
    if (rank == 0)
        write_close();
    if (rank > 0)
        MPI_Recv(&word, 1, MPI_INT, rank - 1, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    if (rank + 1 < size)
        MPI_Send(&word, 1, MPI_INT, rank + 1, 7, MPI_COMM_WORLD);
    else
        open_read();
}

static void ring(void)
{
    int mine = rank, theirs, next = (rank + 1) % size, before = (rank + size - 1) % size;
    int fd = opened(O_RDWR | O_CREAT);
    put(fd, rank * 10, 10, 'x');
    close(fd);
    MPI_Sendrecv(&mine, 1, MPI_INT, next, 7, &theirs, 1, MPI_INT, before, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    fd = opened(O_RDWR);
    get(fd, before * 10, 10);
    close(fd);
}

/* -- collective calls */

#define AROUND(name, call)     \
    static void name(void)     \
    {                          \
        int a = 0, b[8] = {0}; \
        (void)a, (void)b;      \
        if (rank == 0)         \
            write_close();     \
        call;                  \
        if (rank == 1)         \
            open_read();       \
    }
AROUND(bcast_from_writer, MPI_Bcast(&a, 1, MPI_INT, 0, MPI_COMM_WORLD))
AROUND(bcast_from_reader, MPI_Bcast(&a, 1, MPI_INT, 1, MPI_COMM_WORLD))
AROUND(reduce_to_reader, MPI_Reduce(&a, b, 1, MPI_INT, MPI_SUM, 1, MPI_COMM_WORLD))
AROUND(reduce_to_writer, MPI_Reduce(&a, b, 1, MPI_INT, MPI_SUM, 0, MPI_COMM_WORLD))
AROUND(allreduce, MPI_Allreduce(&a, b, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD))
AROUND(allgather, MPI_Allgather(&a, 1, MPI_INT, b, 1, MPI_INT, MPI_COMM_WORLD))
AROUND(scatter, MPI_Scatter(b, 1, MPI_INT, &a, 1, MPI_INT, 0, MPI_COMM_WORLD))
AROUND(gather_to_writer, MPI_Gather(&a, 1, MPI_INT, b, 1, MPI_INT, 0, MPI_COMM_WORLD))
AROUND(scan_up, MPI_Scan(&a, b, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD))

static void scan_down(void)
{
    int a = 0, b;
    if (rank == 1)
        write_close();
    MPI_Scan(&a, &b, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0)
        open_read();
}

static void barrier_later(void)
{
    MPI_Request request;
    if (rank == 0)
        write_close();
    MPI_Ibarrier(MPI_COMM_WORLD, &request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    if (rank == 1)
        open_read();
}

static void barrier_not_awaited(void)
{
    MPI_Request request;
    if (rank == 0)
        write_close();
    MPI_Ibarrier(MPI_COMM_WORLD, &request);
    if (rank == 1)
        open_read();
    MPI_Wait(&request, MPI_STATUS_IGNORE);
}

static void part_barrier(int reader)
{
    MPI_Comm part;
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &part);
    if (rank == 0)
        write_close();
    MPI_Barrier(part);
    if (rank == reader)
        open_read();
    MPI_Comm_free(&part);
}

static void barrier_of_a_part(void)
{
    part_barrier(2);
}

static void barrier_of_the_other_part(void)
{
    part_barrier(1);
}

static void barrier_of_a_copy(void)
{
    MPI_Comm copy;
    MPI_Comm_dup(MPI_COMM_WORLD, &copy);
    if (rank == 0)
        write_close();
    MPI_Barrier(copy);
    if (rank == 1)
        open_read();
    MPI_Comm_free(&copy);
}

/* -- locks */

static void locked(void)
{
    int fd = opened(O_RDWR | O_CREAT);
    lock(fd, F_WRLCK, 0, 10);
    put(fd, 0, 10, get(fd, 0, 10) + 1);
    lock(fd, F_UNLCK, 0, 10);
    close(fd);
}

static void locked_until_closed(void)
{
    int fd = opened(O_RDWR | O_CREAT);
    lock(fd, F_WRLCK, 0, 0);
    put(fd, 0, 10, get(fd, 0, 10) + 1);
    close(fd);
}

static void flocked(void)
{
    int fd = opened(O_RDWR | O_CREAT);
    NEEDS(flock(fd, LOCK_EX) == 0);
    put(fd, 0, 10, get(fd, 0, 10) + 1);
    NEEDS(flock(fd, LOCK_UN) == 0);
    close(fd);
}

static void lock_is_shared(void)
{
    int fd = opened(O_RDWR | O_CREAT);
    lock(fd, F_RDLCK, 0, 10);
    put(fd, 0, 10, 'x');
    lock(fd, F_UNLCK, 0, 10);
    close(fd);
}

static void lock_of_other_bytes(void)
{
    int fd = opened(O_RDWR | O_CREAT);
    lock(fd, F_WRLCK, 100 * (rank + 1), 10);
    put(fd, 0, 10, 'x');
    lock(fd, F_UNLCK, 100 * (rank + 1), 10);
    close(fd);
}

static void reader_without_lock(void)
{
    int fd = opened(O_RDWR | O_CREAT);
    if (rank == 0) {
        lock(fd, F_WRLCK, 0, 10);
        put(fd, 0, 10, 'x');
        lock(fd, F_UNLCK, 0, 10);
    } else {
        get(fd, 0, 10);
    }
    close(fd);
}

/* -- appends */

static void appends(void)
{
    int fd = opened(O_RDWR | O_CREAT | O_APPEND);
    NEEDS(write(fd, "0123456789", 10) == 10);
    close(fd);
}

static void appends_in_turn(void)
{
    for (int turn = 0; turn < size; turn++) {
        if (turn == rank)
            appends();
        barrier();
    }
}

/* -- MPI-IO */

static void file_sync_barrier_sync(void)
{
    MPI_File file;
    char bytes[10] = "xxxxxxxxx";
    MPI_File_open(MPI_COMM_WORLD, path, MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL, &file);
    if (rank == 0)
        MPI_File_write_at(file, 0, bytes, 10, MPI_BYTE, MPI_STATUS_IGNORE);
    MPI_File_sync(file);
    barrier();
    MPI_File_sync(file);
    if (rank == 1)
        MPI_File_read_at(file, 0, bytes, 10, MPI_BYTE, MPI_STATUS_IGNORE);
    MPI_File_close(&file);
}

static void file_close_open(void)
{
    MPI_File file;
    char bytes[10] = "xxxxxxxxx";
    for (int step = 0; step < 2; step++) {
        MPI_File_open(MPI_COMM_WORLD, path, MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL, &file);
        if (rank == step && step == 0)
            MPI_File_write_at(file, 0, bytes, 10, MPI_BYTE, MPI_STATUS_IGNORE);
        if (rank == step && step == 1)
            MPI_File_read_at(file, 0, bytes, 10, MPI_BYTE, MPI_STATUS_IGNORE);
        MPI_File_close(&file);
        barrier();
    }
}

static void file_barrier_only(void)
{
    MPI_File file;
    char bytes[10] = "xxxxxxxxx";
    MPI_File_open(MPI_COMM_WORLD, path, MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL, &file);
    if (rank == 0)
        MPI_File_write_at(file, 0, bytes, 10, MPI_BYTE, MPI_STATUS_IGNORE);
    barrier();
    if (rank == 1)
        MPI_File_read_at(file, 0, bytes, 10, MPI_BYTE, MPI_STATUS_IGNORE);
    MPI_File_close(&file);
}

static void file_collective(void)
{
    MPI_File file;
    char bytes[10] = "xxxxxxxxx";
    for (int step = 0; step < 2; step++) {
        MPI_File_open(MPI_COMM_WORLD, path, MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL, &file);
        if (step == 0)
            MPI_File_write_at_all(file, rank * 10, bytes, 10, MPI_BYTE, MPI_STATUS_IGNORE);
        else
            MPI_File_read_at_all(file, (size - 1 - rank) * 10, bytes, 10, MPI_BYTE, MPI_STATUS_IGNORE);
        MPI_File_close(&file);
        barrier();
    }
}

#define CASE(name) {#name, name}
static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {
    CASE(plain_unordered), CASE(overlap_by_one), CASE(disjoint), CASE(only_reads),
    CASE(truncate_against_write), CASE(all_truncate), CASE(root_truncates), CASE(barrier_only),
    CASE(fsync_barrier), CASE(fsync_barrier_fsync), CASE(close_barrier_open), CASE(close_barrier),
    CASE(close_after_barrier), CASE(fsync_after_barrier), CASE(read_then_overwrite), CASE(overwrite),
    CASE(overwrite_unseen), CASE(steps), CASE(message), CASE(message_wrong_way), CASE(message_later),
    CASE(message_not_awaited), CASE(message_from_anybody), CASE(message_too_early),
    CASE(second_message_first), CASE(requests_kept), CASE(passed_on), CASE(ring),
    CASE(bcast_from_writer), CASE(bcast_from_reader), CASE(reduce_to_reader), CASE(reduce_to_writer),
    CASE(allreduce), CASE(allgather), CASE(scatter), CASE(gather_to_writer), CASE(scan_up),
    CASE(scan_down), CASE(barrier_later), CASE(barrier_not_awaited), CASE(barrier_of_a_part),
    CASE(barrier_of_the_other_part), CASE(barrier_of_a_copy), CASE(locked), CASE(locked_until_closed),
    CASE(flocked), CASE(lock_is_shared), CASE(lock_of_other_bytes), CASE(reader_without_lock),
    CASE(appends), CASE(appends_in_turn), CASE(file_sync_barrier_sync), CASE(file_close_open),
    CASE(file_barrier_only), CASE(file_collective),
};

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    NEEDS(argc == 3);
    path = argv[2];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (strcmp(cases[i].name, argv[1]) == 0) {
            cases[i].run();
            MPI_Finalize();
            return 0;
        }
    }
    fprintf(stderr, "no program %s\n", argv[1]);
    MPI_Abort(MPI_COMM_WORLD, 9);
}
