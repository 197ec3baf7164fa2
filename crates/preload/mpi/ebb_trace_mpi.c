/*
 * What orders the ranks of an MPI program, told to libebb_trace.so.
 *
 * MPICH and Open MPI differ in what handles and statuses are, so this is built where it is used, by
 * `ebb trace`, with the MPI compiler that built the program. It is linked with no MPI library: in a
 * program without MPI nothing of it is ever called.
 *
 * Communicators get a number that all of their ranks know: rank 0 of a new one makes it up and
 * broadcasts it. Messages are told with the sender's and the receiver's rank; which send belongs to
 * which receive follows from their order, as MPI lets no message overtake another one.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <mpi.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Open MPI's handles are addresses, which a program without MPI does not have. */
#ifdef OPEN_MPI
#pragma weak ompi_mpi_comm_world
#pragma weak ompi_mpi_comm_self
#pragma weak ompi_mpi_comm_null
#pragma weak ompi_mpi_byte
#pragma weak ompi_request_null
#endif

enum { WORLD, SEND, RECV, ENTER, LEAVE, ASKED, ANSWERED, UNKNOWN };
enum { ALL, FROM_ROOT, TO_ROOT, PREFIX };

typedef void (*note_fn)(uint32_t, uint32_t, const uint64_t *, uintptr_t);

struct comm {
    uint64_t id;
    uint64_t collectives;
    int rank;
    int size;
};

/* A request that somebody waits for. */
struct pending {
    MPI_Request request;
    struct comm comm;
    uint64_t number; /* when the receive was posted, or which collective it is */
    int call;
    int is_receive;
    int is_send; /* of a persistent request */
    int is_persistent;
    int tag, peer;
    struct pending *next;
};

#define BUCKETS 4096
static struct pending *pending[BUCKETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static note_fn note;
static int key = MPI_KEYVAL_INVALID;
static uint64_t world, made, posts;
static int world_rank;

static int find_in(struct dl_phdr_info *info, size_t size, void *found)
{
    (void)size;
    void **of = found;
    if (!strstr(info->dlpi_name, "libmpi"))
        return 0;
    void *library = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
    if (!library)
        return 0;
    of[1] = dlsym(library, of[0]);
    return of[1] != NULL;
}

/* The MPI library's own entry, wherever it is loaded. */
static void *real_of(const char *name)
{
    void *found[2] = {(void *)name, dlsym(RTLD_DEFAULT, name)};
    if (!found[1])
        dl_iterate_phdr(find_in, found);
    if (!found[1]) {
        fprintf(stderr, "ebb trace: this program's MPI library has no %s\n", name);
        abort();
    }
    return found[1];
}

#define FROM ((uintptr_t)__builtin_return_address(0))
#define REAL(name)                              \
    static __typeof__(&name) real;              \
    if (!real)                                  \
    real = (__typeof__(&name))real_of("P" #name)

static void tell(int kind, int call, uintptr_t from, uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e,
                 uint64_t f)
{
    uint64_t of[6] = {a, b, c, d, e, f};
    if (note)
        note(kind, call, of, from);
}

static struct comm *known(MPI_Comm comm)
{
    void *found = NULL;
    int is_there = 0;
    if (!note || key == MPI_KEYVAL_INVALID || comm == MPI_COMM_NULL)
        return NULL;
    REAL(MPI_Comm_get_attr);
    real(comm, key, &found, &is_there);
    return is_there ? found : NULL;
}

/* A copy of a communicator gets a number of its own. */
static int not_copied(MPI_Comm comm, int k, void *extra, void *value, void *copy, int *is_copied)
{
    (void)comm, (void)k, (void)extra, (void)value, (void)copy;
    *is_copied = 0;
    return MPI_SUCCESS;
}

static int forget(MPI_Comm comm, int k, void *value, void *extra)
{
    (void)comm, (void)k, (void)extra;
    free(value);
    return MPI_SUCCESS;
}

static uint64_t mixed(uint64_t n)
{
    n ^= n >> 33;
    n *= 0xff51afd7ed558ccdULL;
    n ^= n >> 33;
    n *= 0xc4ceb9fe1a85ec53ULL;
    return n ^ (n >> 33);
}

/* A number for a communicator that all its ranks have just made. */
static struct comm *numbered(MPI_Comm comm)
{
    struct comm *new = calloc(1, sizeof *new);
    if (!new)
        return NULL;
    {
        REAL(MPI_Comm_rank);
        real(comm, &new->rank);
    }
    {
        REAL(MPI_Comm_size);
        real(comm, &new->size);
    }
    new->id = mixed(world ^ mixed(((uint64_t)world_rank << 32) + ++made)) >> 16;
    REAL(MPI_Bcast);
    real(&new->id, (int)sizeof new->id, MPI_BYTE, 0, comm);
    return new;
}

static void unknown(int call, uintptr_t from)
{
    tell(UNKNOWN, call, from, 0, 0, 0, 0, 0, 0);
}

static void adopt(MPI_Comm comm, uintptr_t from)
{
    int is_inter = 0;
    if (!note || key == MPI_KEYVAL_INVALID || comm == MPI_COMM_NULL)
        return;
    {
        REAL(MPI_Comm_test_inter);
        real(comm, &is_inter);
    }
    if (is_inter) {
        unknown(CALL_MPI_Comm, from);
        return;
    }
    struct comm *new = numbered(comm);
    REAL(MPI_Comm_set_attr);
    if (new)
        real(comm, key, new);
}

/* Is this the MPI whose compiler built this library? */
static int is_ours(void)
{
    char text[MPI_MAX_LIBRARY_VERSION_STRING + 1] = "";
    int len = 0;
    REAL(MPI_Get_library_version);
    real(text, &len);
#if defined(OPEN_MPI)
    return strstr(text, "Open MPI") != NULL;
#else
    return strstr(text, "Open MPI") == NULL;
#endif
}

static void begin(uintptr_t from)
{
    if (!is_ours()) {
        fprintf(stderr, "ebb trace: this program's MPI is not that of the compiler given with --mpicc: "
                        "order between its ranks is not recorded\n");
        return;
    }
    note = (note_fn)dlsym(RTLD_DEFAULT, "ebb_trace_note");
    if (!note)
        return;
    REAL(MPI_Comm_create_keyval);
    real(not_copied, forget, &key, NULL);
    {
        REAL(MPI_Comm_rank);
        real(MPI_COMM_WORLD, &world_rank);
    }
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    world = mixed(mixed(now.tv_sec * 1000000007ULL + now.tv_nsec) + getpid());
    adopt(MPI_COMM_WORLD, from);
    struct comm *all = known(MPI_COMM_WORLD);
    if (all) {
        world = all->id;
        tell(WORLD, CALL_MPI_Init, from, all->id, all->rank, all->size, 0, 0, 0);
    }
    adopt(MPI_COMM_SELF, from);
}

int MPI_Init(int *argc, char ***argv)
{
    REAL(MPI_Init);
    int result = real(argc, argv);
    begin(FROM);
    return result;
}

int MPI_Init_thread(int *argc, char ***argv, int wanted, int *got)
{
    REAL(MPI_Init_thread);
    int result = real(argc, argv, wanted, got);
    begin(FROM);
    return result;
}

int MPI_Finalize(void)
{
    REAL(MPI_Finalize);
    key = MPI_KEYVAL_INVALID;
    return real();
}

/* -- requests */

static unsigned bucket(MPI_Request request)
{
    uint64_t bits = 0;
    memcpy(&bits, &request, sizeof request < sizeof bits ? sizeof request : sizeof bits);
    return mixed(bits) % BUCKETS;
}

static struct pending *remember(MPI_Request request, const struct comm *comm)
{
    struct pending *new = calloc(1, sizeof *new);
    if (!new)
        return NULL;
    new->request = request;
    new->comm = *comm;
    unsigned at = bucket(request);
    pthread_mutex_lock(&lock);
    new->next = pending[at];
    pending[at] = new;
    pthread_mutex_unlock(&lock);
    return new;
}

static struct pending **place_of(MPI_Request request)
{
    struct pending **at = &pending[bucket(request)];
    while (*at && (*at)->request != request)
        at = &(*at)->next;
    return at;
}

static void drop(MPI_Request request)
{
    pthread_mutex_lock(&lock);
    struct pending **at = place_of(request), *old = *at;
    if (old)
        *at = old->next;
    pthread_mutex_unlock(&lock);
    free(old);
}

static void received(const struct comm *comm, int call, uintptr_t from, uint64_t posted, const MPI_Status *status)
{
    int cancelled = 0;
    REAL(MPI_Test_cancelled);
    real(status, &cancelled);
    if (!cancelled && status->MPI_SOURCE >= 0)
        tell(RECV, call, from, comm->id, status->MPI_SOURCE, comm->rank, status->MPI_TAG, posted, 0);
}

static void left(const struct comm *comm, int call, uintptr_t from, uint64_t number)
{
    tell(LEAVE, call, from, comm->id, number, comm->rank, 0, 0, 0);
}

/* A request is done. */
static void done(MPI_Request request, const MPI_Status *status, uintptr_t from)
{
    if (!note || request == MPI_REQUEST_NULL)
        return;
    pthread_mutex_lock(&lock);
    struct pending **at = place_of(request), *old = *at, copy;
    if (old) {
        copy = *old;
        if (!old->is_persistent)
            *at = old->next;
    }
    pthread_mutex_unlock(&lock);
    if (!old)
        return;
    if (!copy.is_persistent)
        free(old);
    if (copy.is_receive)
        received(&copy.comm, CALL_MPI_Wait, from, copy.number, status);
    else if (!copy.is_send)
        left(&copy.comm, CALL_MPI_Wait, from, copy.number);
}

static uint64_t posted(void)
{
    return __atomic_add_fetch(&posts, 1, __ATOMIC_RELAXED);
}

static void sent(MPI_Comm comm, int to, int tag, uintptr_t from)
{
    struct comm *in = known(comm);
    if (in && to >= 0)
        tell(SEND, CALL_MPI_Send, from, in->id, in->rank, to, tag, 0, 0);
    else if (!in)
        unknown(CALL_MPI_Send, from);
}

static void expected(MPI_Comm comm, MPI_Request request, int result)
{
    struct comm *in = known(comm);
    struct pending *new = in && result == MPI_SUCCESS ? remember(request, in) : NULL;
    if (new) {
        new->number = posted();
        new->is_receive = 1;
    }
}

/* -- messages */

#define SENDING(name)                                                                                    \
    int name(const void *of, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm)                   \
    {                                                                                                    \
        REAL(name);                                                                                      \
        sent(comm, to, tag, FROM);                                                                       \
        return real(of, n, type, to, tag, comm);                                                         \
    }
SENDING(MPI_Send)
SENDING(MPI_Ssend)
SENDING(MPI_Rsend)
SENDING(MPI_Bsend)

#define STARTING(name)                                                                                   \
    int name(const void *of, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request *request) \
    {                                                                                                    \
        REAL(name);                                                                                      \
        sent(comm, to, tag, FROM);                                                                       \
        return real(of, n, type, to, tag, comm, request);                                                \
    }
STARTING(MPI_Isend)
STARTING(MPI_Issend)
STARTING(MPI_Irsend)
STARTING(MPI_Ibsend)

#define PREPARING(name)                                                                                  \
    int name(const void *of, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request *request) \
    {                                                                                                    \
        REAL(name);                                                                                      \
        int result = real(of, n, type, to, tag, comm, request);                                          \
        struct comm *in = known(comm);                                                                   \
        struct pending *new = in ? remember(*request, in) : NULL;                                        \
        if (new)                                                                                         \
            new->is_send = new->is_persistent = 1, new->peer = to, new->tag = tag;                       \
        return result;                                                                                   \
    }
PREPARING(MPI_Send_init)
PREPARING(MPI_Ssend_init)
PREPARING(MPI_Rsend_init)
PREPARING(MPI_Bsend_init)

int MPI_Recv_init(void *to, int n, MPI_Datatype type, int of, int tag, MPI_Comm comm, MPI_Request *request)
{
    REAL(MPI_Recv_init);
    int result = real(to, n, type, of, tag, comm, request);
    struct comm *in = known(comm);
    struct pending *new = in ? remember(*request, in) : NULL;
    if (new)
        new->is_receive = new->is_persistent = 1;
    return result;
}

static void started(MPI_Request request, uintptr_t from)
{
    struct comm comm;
    int to = -1, tag = 0;
    pthread_mutex_lock(&lock);
    struct pending *of = *place_of(request);
    if (of && of->is_receive)
        of->number = posted();
    if (of && of->is_send)
        comm = of->comm, to = of->peer, tag = of->tag;
    pthread_mutex_unlock(&lock);
    if (to >= 0)
        tell(SEND, CALL_MPI_Send, from, comm.id, comm.rank, to, tag, 0, 0);
}

int MPI_Start(MPI_Request *request)
{
    REAL(MPI_Start);
    started(*request, FROM);
    return real(request);
}

int MPI_Startall(int n, MPI_Request requests[])
{
    REAL(MPI_Startall);
    for (int i = 0; i < n; i++)
        started(requests[i], FROM);
    return real(n, requests);
}

int MPI_Recv(void *to, int n, MPI_Datatype type, int of, int tag, MPI_Comm comm, MPI_Status *status)
{
    MPI_Status own;
    REAL(MPI_Recv);
    uint64_t number = posted();
    status = status == MPI_STATUS_IGNORE ? &own : status;
    int result = real(to, n, type, of, tag, comm, status);
    struct comm *in = known(comm);
    if (in && of != MPI_PROC_NULL && result == MPI_SUCCESS)
        received(in, CALL_MPI_Recv, FROM, number, status);
    else if (!in)
        unknown(CALL_MPI_Recv, FROM);
    return result;
}

int MPI_Irecv(void *to, int n, MPI_Datatype type, int of, int tag, MPI_Comm comm, MPI_Request *request)
{
    REAL(MPI_Irecv);
    int result = real(to, n, type, of, tag, comm, request);
    if (of != MPI_PROC_NULL)
        expected(comm, *request, result);
    return result;
}

int MPI_Sendrecv(const void *out, int n, MPI_Datatype type, int dest, int tag, void *in, int m, MPI_Datatype in_type,
                 int of, int in_tag, MPI_Comm comm, MPI_Status *status)
{
    MPI_Status own;
    REAL(MPI_Sendrecv);
    sent(comm, dest, tag, FROM);
    uint64_t number = posted();
    status = status == MPI_STATUS_IGNORE ? &own : status;
    int result = real(out, n, type, dest, tag, in, m, in_type, of, in_tag, comm, status);
    struct comm *k = known(comm);
    if (k && of != MPI_PROC_NULL && result == MPI_SUCCESS)
        received(k, CALL_MPI_Recv, FROM, number, status);
    return result;
}

int MPI_Sendrecv_replace(void *both, int n, MPI_Datatype type, int dest, int tag, int of, int in_tag, MPI_Comm comm,
                         MPI_Status *status)
{
    MPI_Status own;
    REAL(MPI_Sendrecv_replace);
    sent(comm, dest, tag, FROM);
    uint64_t number = posted();
    status = status == MPI_STATUS_IGNORE ? &own : status;
    int result = real(both, n, type, dest, tag, of, in_tag, comm, status);
    struct comm *k = known(comm);
    if (k && of != MPI_PROC_NULL && result == MPI_SUCCESS)
        received(k, CALL_MPI_Recv, FROM, number, status);
    return result;
}

/* -- ends of requests */

int MPI_Wait(MPI_Request *request, MPI_Status *status)
{
    MPI_Status own;
    MPI_Request was = *request;
    REAL(MPI_Wait);
    status = status == MPI_STATUS_IGNORE ? &own : status;
    int result = real(request, status);
    done(was, status, FROM);
    return result;
}

int MPI_Test(MPI_Request *request, int *flag, MPI_Status *status)
{
    MPI_Status own;
    MPI_Request was = *request;
    REAL(MPI_Test);
    status = status == MPI_STATUS_IGNORE ? &own : status;
    int result = real(request, flag, status);
    if (*flag)
        done(was, status, FROM);
    return result;
}

/* A copy of handles, and room for their statuses. */
struct several {
    MPI_Request *were;
    MPI_Status *statuses;
};

static struct several several(int n, const MPI_Request requests[])
{
    struct several made = {malloc((n + 1) * sizeof(MPI_Request)), malloc((n + 1) * sizeof(MPI_Status))};
    if (!made.were || !made.statuses)
        abort();
    memcpy(made.were, requests, n * sizeof(MPI_Request));
    return made;
}

static void freed(struct several *of)
{
    free(of->were);
    free(of->statuses);
}

int MPI_Waitall(int n, MPI_Request requests[], MPI_Status statuses[])
{
    struct several s = several(n, requests);
    REAL(MPI_Waitall);
    MPI_Status *to = statuses == MPI_STATUSES_IGNORE ? s.statuses : statuses;
    int result = real(n, requests, to);
    for (int i = 0; i < n; i++)
        done(s.were[i], &to[i], FROM);
    freed(&s);
    return result;
}

int MPI_Testall(int n, MPI_Request requests[], int *flag, MPI_Status statuses[])
{
    struct several s = several(n, requests);
    REAL(MPI_Testall);
    MPI_Status *to = statuses == MPI_STATUSES_IGNORE ? s.statuses : statuses;
    int result = real(n, requests, flag, to);
    for (int i = 0; *flag && i < n; i++)
        done(s.were[i], &to[i], FROM);
    freed(&s);
    return result;
}

int MPI_Waitany(int n, MPI_Request requests[], int *which, MPI_Status *status)
{
    MPI_Status own;
    struct several s = several(n, requests);
    REAL(MPI_Waitany);
    status = status == MPI_STATUS_IGNORE ? &own : status;
    int result = real(n, requests, which, status);
    if (*which != MPI_UNDEFINED)
        done(s.were[*which], status, FROM);
    freed(&s);
    return result;
}

int MPI_Testany(int n, MPI_Request requests[], int *which, int *flag, MPI_Status *status)
{
    MPI_Status own;
    struct several s = several(n, requests);
    REAL(MPI_Testany);
    status = status == MPI_STATUS_IGNORE ? &own : status;
    int result = real(n, requests, which, flag, status);
    if (*flag && *which != MPI_UNDEFINED)
        done(s.were[*which], status, FROM);
    freed(&s);
    return result;
}

#define SOME(name)                                                                                       \
    int name(int n, MPI_Request requests[], int *count, int which[], MPI_Status statuses[])              \
    {                                                                                                    \
        struct several s = several(n, requests);                                                         \
        REAL(name);                                                                                      \
        MPI_Status *to = statuses == MPI_STATUSES_IGNORE ? s.statuses : statuses;                        \
        int result = real(n, requests, count, which, to);                                                \
        for (int i = 0; *count != MPI_UNDEFINED && i < *count; i++)                                      \
            done(s.were[which[i]], &to[i], FROM);                                                        \
        freed(&s);                                                                                       \
        return result;                                                                                   \
    }
SOME(MPI_Waitsome)
SOME(MPI_Testsome)

int MPI_Request_free(MPI_Request *request)
{
    REAL(MPI_Request_free);
    drop(*request);
    return real(request);
}

/* -- collective calls */

static uint64_t enter(struct comm *in, int root, int flow, int call, uintptr_t from)
{
    if (!in)
        return 0;
    uint64_t number = in->collectives++;
    tell(ENTER, call, from, in->id, number, in->rank, in->size, root, flow);
    return number;
}

#define COLLECTIVE(name, call, root, flow, params, arguments)                                            \
    int name params                                                                                      \
    {                                                                                                    \
        REAL(name);                                                                                      \
        struct comm *in = known(comm);                                                                   \
        uint64_t number = enter(in, root, flow, call, FROM);                                             \
        int result = real arguments;                                                                     \
        if (in)                                                                                          \
            left(in, call, FROM, number);                                                                \
        else                                                                                             \
            unknown(call, FROM);                                                                         \
        return result;                                                                                   \
    }

#define LATER(name, call, root, flow, params, arguments)                                                 \
    int name params                                                                                      \
    {                                                                                                    \
        REAL(name);                                                                                      \
        struct comm *in = known(comm);                                                                   \
        uint64_t number = enter(in, root, flow, call, FROM);                                             \
        int result = real arguments;                                                                     \
        struct pending *new = in && result == MPI_SUCCESS ? remember(*request, in) : NULL;               \
        if (new)                                                                                         \
            new->number = number;                                                                        \
        return result;                                                                                   \
    }

#define UNPACK(...) __VA_ARGS__
/* Both forms of a call: params and arguments without their parentheses. */
#define BOTH(name, iname, call, root, flow, params, arguments)                                           \
    COLLECTIVE(name, call, root, flow, (UNPACK params, MPI_Comm comm), (UNPACK arguments, comm))         \
    LATER(iname, call, root, flow, (UNPACK params, MPI_Comm comm, MPI_Request *request),                 \
          (UNPACK arguments, comm, request))

COLLECTIVE(MPI_Barrier, CALL_MPI_Barrier, 0, ALL, (MPI_Comm comm), (comm))
LATER(MPI_Ibarrier, CALL_MPI_Barrier, 0, ALL, (MPI_Comm comm, MPI_Request *request), (comm, request))
BOTH(MPI_Bcast, MPI_Ibcast, CALL_MPI_Bcast, root, FROM_ROOT, (void *of, int n, MPI_Datatype t, int root), (of, n, t, root))
BOTH(MPI_Reduce, MPI_Ireduce, CALL_MPI_Reduce, root, TO_ROOT,
     (const void *of, void *to, int n, MPI_Datatype t, MPI_Op op, int root), (of, to, n, t, op, root))
BOTH(MPI_Allreduce, MPI_Iallreduce, CALL_MPI_Allreduce, 0, ALL,
     (const void *of, void *to, int n, MPI_Datatype t, MPI_Op op), (of, to, n, t, op))
BOTH(MPI_Gather, MPI_Igather, CALL_MPI_Gather, root, TO_ROOT,
     (const void *of, int n, MPI_Datatype t, void *to, int m, MPI_Datatype u, int root), (of, n, t, to, m, u, root))
BOTH(MPI_Gatherv, MPI_Igatherv, CALL_MPI_Gather, root, TO_ROOT,
     (const void *of, int n, MPI_Datatype t, void *to, const int *m, const int *d, MPI_Datatype u, int root),
     (of, n, t, to, m, d, u, root))
BOTH(MPI_Scatter, MPI_Iscatter, CALL_MPI_Scatter, root, FROM_ROOT,
     (const void *of, int n, MPI_Datatype t, void *to, int m, MPI_Datatype u, int root), (of, n, t, to, m, u, root))
BOTH(MPI_Scatterv, MPI_Iscatterv, CALL_MPI_Scatter, root, FROM_ROOT,
     (const void *of, const int *n, const int *d, MPI_Datatype t, void *to, int m, MPI_Datatype u, int root),
     (of, n, d, t, to, m, u, root))
BOTH(MPI_Allgather, MPI_Iallgather, CALL_MPI_Allgather, 0, ALL,
     (const void *of, int n, MPI_Datatype t, void *to, int m, MPI_Datatype u), (of, n, t, to, m, u))
BOTH(MPI_Allgatherv, MPI_Iallgatherv, CALL_MPI_Allgather, 0, ALL,
     (const void *of, int n, MPI_Datatype t, void *to, const int *m, const int *d, MPI_Datatype u),
     (of, n, t, to, m, d, u))
BOTH(MPI_Alltoall, MPI_Ialltoall, CALL_MPI_Alltoall, 0, ALL,
     (const void *of, int n, MPI_Datatype t, void *to, int m, MPI_Datatype u), (of, n, t, to, m, u))
BOTH(MPI_Alltoallv, MPI_Ialltoallv, CALL_MPI_Alltoall, 0, ALL,
     (const void *of, const int *n, const int *d, MPI_Datatype t, void *to, const int *m, const int *e, MPI_Datatype u),
     (of, n, d, t, to, m, e, u))
BOTH(MPI_Reduce_scatter, MPI_Ireduce_scatter, CALL_MPI_Allreduce, 0, ALL,
     (const void *of, void *to, const int *n, MPI_Datatype t, MPI_Op op), (of, to, n, t, op))
BOTH(MPI_Reduce_scatter_block, MPI_Ireduce_scatter_block, CALL_MPI_Allreduce, 0, ALL,
     (const void *of, void *to, int n, MPI_Datatype t, MPI_Op op), (of, to, n, t, op))
BOTH(MPI_Scan, MPI_Iscan, CALL_MPI_Scan, 0, PREFIX, (const void *of, void *to, int n, MPI_Datatype t, MPI_Op op),
     (of, to, n, t, op))
BOTH(MPI_Exscan, MPI_Iexscan, CALL_MPI_Scan, 0, PREFIX, (const void *of, void *to, int n, MPI_Datatype t, MPI_Op op),
     (of, to, n, t, op))

/* -- communicators */

#define MAKES(name, params, arguments)                                                                   \
    int name params                                                                                      \
    {                                                                                                    \
        REAL(name);                                                                                      \
        int result = real arguments;                                                                     \
        if (result == MPI_SUCCESS)                                                                       \
            adopt(*new, FROM);                                                                           \
        return result;                                                                                   \
    }
MAKES(MPI_Comm_dup, (MPI_Comm comm, MPI_Comm *new), (comm, new))
MAKES(MPI_Comm_dup_with_info, (MPI_Comm comm, MPI_Info info, MPI_Comm *new), (comm, info, new))
MAKES(MPI_Comm_split, (MPI_Comm comm, int color, int order, MPI_Comm *new), (comm, color, order, new))
MAKES(MPI_Comm_split_type, (MPI_Comm comm, int type, int order, MPI_Info info, MPI_Comm *new),
      (comm, type, order, info, new))
MAKES(MPI_Comm_create, (MPI_Comm comm, MPI_Group group, MPI_Comm *new), (comm, group, new))
MAKES(MPI_Comm_create_group, (MPI_Comm comm, MPI_Group group, int tag, MPI_Comm *new), (comm, group, tag, new))
MAKES(MPI_Cart_create, (MPI_Comm comm, int n, const int *dims, const int *periods, int reorder, MPI_Comm *new),
      (comm, n, dims, periods, reorder, new))
MAKES(MPI_Cart_sub, (MPI_Comm comm, const int *remain, MPI_Comm *new), (comm, remain, new))
MAKES(MPI_Intercomm_merge, (MPI_Comm comm, int high, MPI_Comm *new), (comm, high, new))

/* -- files: what they do to the file system is told by the calls of the C library that they make */

#define FILES 256
static struct {
    MPI_File file;
    struct comm *comm;
} files[FILES];

static struct comm *of_file(MPI_File file)
{
    for (int i = 0; i < FILES; i++)
        if (files[i].comm && files[i].file == file)
            return files[i].comm;
    return NULL;
}

int MPI_File_open(MPI_Comm comm, const char *path, int mode, MPI_Info info, MPI_File *file)
{
    REAL(MPI_File_open);
    struct comm *in = known(comm) ? numbered(comm) : NULL;
    uint64_t number = enter(in, 0, FROM_ROOT, CALL_MPI_File_open, FROM);
    int result = real(comm, path, mode, info, file);
    if (!in)
        return result;
    left(in, CALL_MPI_File_open, FROM, number);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < FILES && in; i++)
        if (!files[i].comm && result == MPI_SUCCESS)
            files[i].file = *file, files[i].comm = in, in = NULL;
    pthread_mutex_unlock(&lock);
    free(in);
    return result;
}

int MPI_File_close(MPI_File *file)
{
    REAL(MPI_File_close);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < FILES; i++)
        if (files[i].comm && files[i].file == *file)
            free(files[i].comm), files[i].comm = NULL;
    pthread_mutex_unlock(&lock);
    return real(file);
}

int MPI_File_sync(MPI_File file)
{
    REAL(MPI_File_sync);
    tell(ASKED, CALL_MPI_File_sync, FROM, 0, 0, 0, 0, 0, 0);
    int result = real(file);
    tell(ANSWERED, CALL_MPI_File_sync, FROM, 0, 0, 0, 0, 0, 0);
    return result;
}

/* Rank 0 cuts or fills, the others hear that it is done. */
#define SIZES(name)                                                                                      \
    int name(MPI_File file, MPI_Offset size)                                                             \
    {                                                                                                    \
        REAL(name);                                                                                      \
        struct comm *in = of_file(file);                                                                 \
        uint64_t number = enter(in, 0, FROM_ROOT, CALL_MPI_File_set_size, FROM);                         \
        int result = real(file, size);                                                                   \
        if (in)                                                                                          \
            left(in, CALL_MPI_File_set_size, FROM, number);                                              \
        return result;                                                                                   \
    }
SIZES(MPI_File_set_size)
SIZES(MPI_File_preallocate)

/* -- what is not understood: order through it is missing, and the trace says so */

#define NOT_UNDERSTOOD(name, params, arguments)                                                          \
    int name params                                                                                      \
    {                                                                                                    \
        REAL(name);                                                                                      \
        unknown(CALL_MPI_Comm, FROM);                                                                    \
        return real arguments;                                                                           \
    }
NOT_UNDERSTOOD(MPI_Win_create, (void *at, MPI_Aint size, int unit, MPI_Info info, MPI_Comm comm, MPI_Win *win),
               (at, size, unit, info, comm, win))
NOT_UNDERSTOOD(MPI_Win_allocate, (MPI_Aint size, int unit, MPI_Info info, MPI_Comm comm, void *at, MPI_Win *win),
               (size, unit, info, comm, at, win))
NOT_UNDERSTOOD(MPI_Win_allocate_shared, (MPI_Aint size, int unit, MPI_Info info, MPI_Comm comm, void *at, MPI_Win *win),
               (size, unit, info, comm, at, win))
NOT_UNDERSTOOD(MPI_Mrecv, (void *to, int n, MPI_Datatype t, MPI_Message *m, MPI_Status *s), (to, n, t, m, s))
NOT_UNDERSTOOD(MPI_Imrecv, (void *to, int n, MPI_Datatype t, MPI_Message *m, MPI_Request *r), (to, n, t, m, r))
NOT_UNDERSTOOD(MPI_Comm_idup, (MPI_Comm comm, MPI_Comm *new, MPI_Request *request), (comm, new, request))
NOT_UNDERSTOOD(MPI_Alltoallw, (const void *of, const int *n, const int *d, const MPI_Datatype *t, void *to, const int *m,
                               const int *e, const MPI_Datatype *u, MPI_Comm comm),
               (of, n, d, t, to, m, e, u, comm))
