/*
 * libebb-mpi: what MPI-IO does collectively costs a mount of Ebb one request of each node, not one of each
 * rank. Preloaded, or linked before the MPI library; programs stay as they are. docs/mpi.md says what it does
 * to which call.
 *
 * Calls of this file are between the program and its MPI library (the profiling interface): what is not about a
 * file of a mount of Ebb, or not collective, is passed on. Reads and writes are the MPI library's.
 */
#define _GNU_SOURCE
#include "ebb.h"
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <mpi.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define FUSE_MAGIC 0x65735546
#define PUBLIC __attribute__((visibility("default")))

/* A file that ranks have open together. */
struct shared {
    struct shared *next;
    MPI_File file;
    MPI_Comm all;   /* who has it open */
    MPI_Comm node;  /* those of them on this node of Ebb; the first one speaks for it */
    int fd;         /* the node's own, of its first rank; else -1 */
    int amode;      /* as the program said */
    char *delete;   /* on the first of all: to be deleted at the close */
    int verbose;
    long calls;
};

static struct shared *files;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* What the first rank has found out about a file. */
enum way { AS_EVER, BY_NAME, BY_HANDLE };
struct word {
    int way;
    int made;    /* the file was made, and exists for all who come */
    int verbose; /* all say what they do, or none */
    unsigned char handle[EBB_HANDLE_SIZE];
    char mount[PATH_MAX];
};

static int is_on(const char *variable, int otherwise)
{
    const char *value = getenv(variable);
    if (!value || !*value)
        return otherwise;
    return strcmp(value, "0") && strcmp(value, "off");
}

static int rank_in(MPI_Comm comm)
{
    int rank;
    PMPI_Comm_rank(comm, &rank);
    return rank;
}

static int size_of(MPI_Comm comm)
{
    int size;
    PMPI_Comm_size(comm, &size);
    return size;
}

static struct shared *known(MPI_File file)
{
    pthread_mutex_lock(&lock);
    struct shared *s = files;
    while (s && s->file != file)
        s = s->next;
    pthread_mutex_unlock(&lock);
    return s;
}

static void forget(struct shared *gone)
{
    pthread_mutex_lock(&lock);
    struct shared **at = &files;
    while (*at && *at != gone)
        at = &(*at)->next;
    if (*at)
        *at = gone->next;
    pthread_mutex_unlock(&lock);
}

static void release(struct shared *s)
{
    if (s->fd >= 0)
        close(s->fd);
    if (s->node != MPI_COMM_NULL)
        PMPI_Comm_free(&s->node);
    if (s->all != MPI_COMM_NULL)
        PMPI_Comm_free(&s->all);
    free(s->delete);
    free(s);
}

static int class_of(int error)
{
    switch (error) {
    case 0: return MPI_SUCCESS;
    case ENOENT: return MPI_ERR_NO_SUCH_FILE;
    case EACCES: case EPERM: case EBADF: return MPI_ERR_ACCESS;
    case ENOSPC: case EFBIG: return MPI_ERR_NO_SPACE;
    case EDQUOT: return MPI_ERR_QUOTA;
    case EROFS: return MPI_ERR_READ_ONLY;
    default: return MPI_ERR_IO;
    }
}

/* What the program hears: as its error handler for the file wants it. */
static int ends_with(MPI_File file, const char *what, int error)
{
    if (error) {
        fprintf(stderr, "libebb-mpi: %s: %s\n", what, strerror(error));
        PMPI_File_call_errhandler(file, class_of(error));
    }
    return class_of(error);
}

/* A failure of one rank is everybody's. Who comes back from this comes back after all have come. */
static int worst(MPI_Comm comm, int error)
{
    int all = error;
    PMPI_Allreduce(&error, &all, 1, MPI_INT, MPI_MAX, comm);
    return all;
}

/* Functions of shared file pointers: the MPI library keeps these in a file beside the opened one. */
static int is_of_shared_pointers(const char *name)
{
    static const char *const prefixes[] = { "MPI_File_", "PMPI_File_", "mpi_file_", "pmpi_file_" };
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++)
        if (!strncmp(name, prefixes[i], strlen(prefixes[i])))
            return strstr(name, "_shared") || strstr(name, "_ordered");
    return 0;
}

/* Where a table of a loaded object lies: most linkers have written addresses there. */
static const void *at(ElfW(Addr) base, ElfW(Addr) address)
{
    return (const void *)(address < base ? base + address : address);
}

/* How many symbols there are, by the newer table: what is behind its second number is in chains, of which the
 * last entry has an odd number. */
static uint32_t symbols_of(const uint32_t *gnu)
{
    uint32_t buckets = gnu[0], first = gnu[1], last = 0;
    const uint32_t *bucket = gnu + 4 + gnu[2] * (sizeof(ElfW(Addr)) / sizeof *gnu);
    const uint32_t *chain = bucket + buckets;
    for (uint32_t i = 0; i < buckets; i++)
        last = bucket[i] > last ? bucket[i] : last;
    if (last < first)
        return first;
    while (!(chain[last - first] & 1))
        last++;
    return last + 1;
}

/* 1 when the object asks others for one of these functions. */
static int imports_shared_pointers(struct dl_phdr_info *info, size_t size, void *found)
{
    (void)size;
    const ElfW(Dyn) *dynamic = NULL;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
            dynamic = (const void *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    const char *base = strrchr(info->dlpi_name, '/');
    base = base ? base + 1 : info->dlpi_name;
    /* Those that have the functions, not those that want them. */
    if (!dynamic || !strncmp(base, "libmpi", 6) || !strncmp(base, "libmca", 6) ||
        !strncmp(base, "mca_", 4) || !strncmp(base, "libpmpi", 7) || !strncmp(base, "linux-vdso", 10))
        return 0;
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    const uint32_t *hash = NULL, *gnu = NULL;
    size_t names_len = 0;
    for (; dynamic->d_tag != DT_NULL; dynamic++)
        switch (dynamic->d_tag) {
        case DT_SYMTAB: symbols = at(info->dlpi_addr, dynamic->d_un.d_ptr); break;
        case DT_STRTAB: names = at(info->dlpi_addr, dynamic->d_un.d_ptr); break;
        case DT_STRSZ: names_len = dynamic->d_un.d_val; break;
        case DT_HASH: hash = at(info->dlpi_addr, dynamic->d_un.d_ptr); break;
        case DT_GNU_HASH: gnu = at(info->dlpi_addr, dynamic->d_un.d_ptr); break;
        }
    uint32_t count = hash ? hash[1] : gnu ? symbols_of(gnu) : 0;
    for (uint32_t i = 1; symbols && names && i < count; i++)
        if (symbols[i].st_shndx == SHN_UNDEF && symbols[i].st_name < names_len &&
            is_of_shared_pointers(names + symbols[i].st_name))
            *(int *)found = 1;
    return *(int *)found;
}

/* How many objects were ever loaded. */
static int loaded(struct dl_phdr_info *info, size_t size, void *count)
{
    (void)size;
    *(unsigned long long *)count = info->dlpi_adds;
    return 1;
}

static int uses_shared_pointers(void)
{
    static unsigned long long looked_at;
    static int found;
    unsigned long long count = 0;
    pthread_mutex_lock(&lock);
    dl_iterate_phdr(loaded, &count);
    /* What has been found stays; who loads more is looked at again. */
    if (!found && count != looked_at) {
        dl_iterate_phdr(imports_shared_pointers, &found);
        looked_at = count;
    }
    int answer = found;
    pthread_mutex_unlock(&lock);
    return answer;
}

static const char *without_kind(const char *name)
{
    return strncmp(name, "ufs:", 4) ? name : name + 4;
}

/* Other kinds are other file systems'. */
static int is_a_path(const char *name)
{
    const char *colon = strchr(name, ':'), *slash = strchr(name, '/');
    return !colon || (slash && slash < colon);
}

static int flags_of(int amode)
{
    int flags = amode & MPI_MODE_RDWR ? O_RDWR : amode & MPI_MODE_WRONLY ? O_WRONLY : O_RDONLY;
    return flags | O_CLOEXEC | O_NOCTTY;
}

/* The device of a path, as the kernel knows it already. */
static int device_of(const char *path, dev_t *device)
{
    struct statx st;
    if (statx(AT_FDCWD, path, AT_STATX_DONT_SYNC, STATX_TYPE, &st))
        return -1;
    *device = makedev(st.stx_dev_major, st.stx_dev_minor);
    return 0;
}

/* The mount that an absolute path is in: the highest directory above it on the same device. */
static int mount_of(const char *path, char mount[PATH_MAX])
{
    char dir[PATH_MAX];
    dev_t device, above;
    if (snprintf(dir, sizeof dir, "%s", path) >= (int)sizeof dir || device_of(dir, &device))
        return -1;
    for (;;) {
        strcpy(mount, dir);
        char *slash = strrchr(dir, '/');
        if (!slash || !dir[1])
            return 0;
        slash[slash == dir] = 0;
        if (device_of(dir, &above) || above != device)
            return 0;
    }
}

/* The first rank makes or opens the file; how, and how the others come to it. -1: no file of ours. */
static int look(const char *name, int amode, struct word *word)
{
    char path[PATH_MAX], dir[PATH_MAX];
    struct statfs fs;
    name = without_kind(name);
    /* Where the name ends does not exist when it is to be made. */
    if (snprintf(dir, sizeof dir, "%s", name) >= (int)sizeof dir)
        return -1;
    char *slash = strrchr(dir, '/');
    if (slash)
        slash[slash == dir] = 0;
    else
        strcpy(dir, ".");
    if (statfs(dir, &fs) || fs.f_type != FUSE_MAGIC || !realpath(dir, path))
        return -1;
    int access = amode & (MPI_MODE_RDONLY | MPI_MODE_WRONLY | MPI_MODE_RDWR), flags = flags_of(amode);
    /* Modes that do not go together are the MPI library's to refuse. */
    if ((access & (access - 1)) || !access ||
        (access == MPI_MODE_RDONLY && amode & (MPI_MODE_CREATE | MPI_MODE_EXCL)) ||
        (access == MPI_MODE_RDWR && amode & MPI_MODE_SEQUENTIAL))
        return -1;
    if (amode & MPI_MODE_CREATE)
        flags |= amode & MPI_MODE_EXCL ? O_CREAT | O_EXCL : O_CREAT;
    int fd = open(name, flags, 0666);
    /* The MPI library tries the same and says why not. */
    if (fd < 0)
        return -1;
    word->made = 1;
    if (!ebb_handle_get(fd, word->handle) && !mount_of(path, word->mount))
        /* With these the MPI library uses its shared pointer itself. */
        word->way = amode & (MPI_MODE_APPEND | MPI_MODE_SEQUENTIAL) ? BY_NAME : BY_HANDLE;
    else if (errno == ENOKEY && !mount_of(path, word->mount))
        word->way = BY_NAME;
    else {
        close(fd);
        return -1;
    }
    return fd;
}

/* The ranks on one node of Ebb: on one machine, with the same mount. */
static int nodes_of(MPI_Comm comm, dev_t device, MPI_Comm *node)
{
    MPI_Comm machine;
    struct { unsigned long long device; int rank; } own = { device, rank_in(comm) }, *all;
    int rc = PMPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, own.rank, MPI_INFO_NULL, &machine);
    if (rc != MPI_SUCCESS)
        return rc;
    /* Numbers of devices are too long for a colour: the first rank that has the same one is it. */
    int n = size_of(machine), colour = own.rank;
    all = calloc(n, sizeof *all);
    if (!all)
        PMPI_Abort(comm, 1);
    PMPI_Allgather(&own, sizeof own, MPI_BYTE, all, sizeof own, MPI_BYTE, machine);
    for (int i = n - 1; i >= 0; i--)
        if (all[i].device == own.device)
            colour = all[i].rank;
    free(all);
    rc = PMPI_Comm_split(machine, colour, own.rank, node);
    PMPI_Comm_free(&machine);
    return rc;
}

/* What the MPI library opens. It asks each rank what kind of file system it is, unless it is told. */
#ifdef MPICH_VERSION
#define KIND "ufs:"
#else
#define KIND ""
#endif
static int path_of_handle(const struct word *word, char path[PATH_MAX])
{
    const size_t kind = sizeof KIND - 1;
    memcpy(path, KIND, kind);
    return ebb_handle_path(word->mount, word->handle, path + kind, PATH_MAX - kind) < 0 ? -1 : 0;
}

/* What fails here is tried in another way: the program's error handler hears of that one alone. */
static int open_quietly(MPI_Comm comm, const char *path, int amode, MPI_Info info, MPI_File *file)
{
    MPI_Errhandler before;
    PMPI_File_get_errhandler(MPI_FILE_NULL, &before);
    PMPI_File_set_errhandler(MPI_FILE_NULL, MPI_ERRORS_RETURN);
    int rc = PMPI_File_open(comm, path, amode, info, file);
    PMPI_File_set_errhandler(MPI_FILE_NULL, before);
    if (rc == MPI_SUCCESS)
        PMPI_File_set_errhandler(*file, before);
    if (before != MPI_ERRORS_RETURN && before != MPI_ERRORS_ARE_FATAL)
        PMPI_Errhandler_free(&before);
    return rc;
}

/* A name that means the same in another working directory. */
static char *absolute(const char *name)
{
    char dir[PATH_MAX], whole[PATH_MAX], *path;
    const char *slash = strrchr(name, '/'), *last = slash ? slash + 1 : name;
    int len = slash ? (slash == name ? 1 : (int)(slash - name)) : 1;
    if (len >= PATH_MAX)
        return NULL;
    memcpy(dir, slash ? name : ".", len);
    dir[len] = 0;
    return realpath(dir, whole) && asprintf(&path, "%s/%s", whole, last) > 0 ? path : NULL;
}

/* Every rank has a file of its own, of the MPI library; every node one of ours beside them. `again`: all have
 * failed, and may try once more as ever. */
static int join(MPI_Comm comm, const char *name, int amode, MPI_Info info, MPI_File *file,
                const struct word *word, int fd, int *again)
{
    struct shared *s = calloc(1, sizeof *s);
    if (!s)
        PMPI_Abort(comm, 1);
    *s = (struct shared){ .all = MPI_COMM_NULL, .node = MPI_COMM_NULL, .fd = fd, .amode = amode,
                          .verbose = word->verbose };
    int error = 0;
    dev_t device = 0;
    if (device_of(word->mount, &device))
        error = errno;
    if (PMPI_Comm_dup(comm, &s->all) != MPI_SUCCESS || nodes_of(s->all, device, &s->node) != MPI_SUCCESS)
        PMPI_Abort(comm, 1);
    /* Programs of a job need not all be the same. */
    int by_handle = word->way == BY_HANDLE && !worst(s->all, uses_shared_pointers());
    if (!error && rank_in(s->node) == 0 && fd < 0) {
        s->fd = by_handle ? ebb_handle_open(word->mount, word->handle, flags_of(amode))
                                       : open(without_kind(name), flags_of(amode));
        error = s->fd < 0 ? errno : 0;
    }
    char path[PATH_MAX];
    if (!error && by_handle && path_of_handle(word, path))
        error = errno;
    int rc = MPI_ERR_OTHER, failed = 1, opened = 0;
    if (!worst(s->all, error)) {
        int now = amode & ~(MPI_MODE_CREATE | MPI_MODE_EXCL | MPI_MODE_DELETE_ON_CLOSE);
        rc = open_quietly(comm, by_handle ? path : name, now, info, file);
        /* Not every MPI library says the same to all. */
        failed = worst(s->all, rc != MPI_SUCCESS);
        opened = worst(s->all, rc == MPI_SUCCESS);
    }
    if (failed && s->verbose) {
        char text[MPI_MAX_ERROR_STRING] = "another rank cannot";
        int len;
        if (rc != MPI_ERR_OTHER && rc != MPI_SUCCESS)
            PMPI_Error_string(rc, text, &len);
        fprintf(stderr, "libebb-mpi: %s: as ever on rank %d: %s\n", name, rank_in(comm),
                error ? strerror(error) : text);
    }
    if (failed) {
        release(s);
        /* Where some have it open there is no second try, in which the others would wait for them. */
        *again = !opened;
        return rc;
    }
    if (amode & MPI_MODE_DELETE_ON_CLOSE && rank_in(s->all) == 0)
        s->delete = absolute(without_kind(name));
    if (s->verbose) {
        int nodes, first = rank_in(s->node) == 0;
        PMPI_Allreduce(&first, &nodes, 1, MPI_INT, MPI_SUM, s->all);
        if (rank_in(s->all) == 0)
            fprintf(stderr, "libebb-mpi: %s: opened %s by %d ranks on %d nodes\n", name,
                    by_handle ? "by a handle" : "by its name", size_of(s->all), nodes);
    }
    s->file = *file;
    pthread_mutex_lock(&lock);
    s->next = files;
    files = s;
    pthread_mutex_unlock(&lock);
    return MPI_SUCCESS;
}

PUBLIC int MPI_File_open(MPI_Comm comm, const char *name, int amode, MPI_Info info, MPI_File *file)
{
    struct word word = { .way = AS_EVER };
    int between = 0, fd = -1;
    PMPI_Comm_test_inter(comm, &between);
    /* Each rank must come to the same end here: nothing but what is the same for all decides. */
    if (between || size_of(comm) < 2)
        return PMPI_File_open(comm, name, amode, info, file);
    if (rank_in(comm) == 0 && is_on("EBB_MPI", 1) && is_a_path(without_kind(name)))
        fd = look(name, amode, &word);
    word.verbose = is_on("EBB_MPI_VERBOSE", 0);
    PMPI_Bcast(&word, sizeof word, MPI_BYTE, 0, comm);
    int again = 1;
    if (word.way != AS_EVER) {
        int rc = join(comm, name, amode, info, file, &word, fd, &again);
        if (rc == MPI_SUCCESS || !again)
            return rc;
    }
    /* It is there now, and the program has made it. */
    if (word.made)
        amode &= ~MPI_MODE_EXCL;
    return PMPI_File_open(comm, name, amode, info, file);
}

/*
 * What a node's ranks have written is published by one of them, when all have come; when all nodes have, one of
 * each looks up what the others published. So it is also for ranks that have written nothing.
 */
PUBLIC int MPI_File_sync(MPI_File file)
{
    struct shared *s = known(file);
    if (!s)
        return PMPI_File_sync(file);
    s->calls++;
    PMPI_Barrier(s->node);
    int error = 0, writes = !(s->amode & MPI_MODE_RDONLY);
    /* Not every model publishes at an fsync. */
    if (s->fd >= 0 && ((writes && ebb_attach_file(s->fd)) || fsync(s->fd)))
        error = errno;
    error = worst(s->all, error);
    if (!error && s->fd >= 0 && ebb_query_file(s->fd, NULL, 0) < 0)
        error = errno;
    return ends_with(file, "sync", worst(s->node, error));
}

static int first_does(struct shared *s, const char *what, MPI_Offset len, int (*act)(int, MPI_Offset))
{
    s->calls++;
    PMPI_Barrier(s->all);
    int error = rank_in(s->all) == 0 ? act(s->fd, len) : 0;
    PMPI_Bcast(&error, 1, MPI_INT, 0, s->all);
    return ends_with(s->file, what, error);
}

static int cut(int fd, MPI_Offset len)
{
    return ftruncate(fd, len) ? errno : 0;
}

static int fill(int fd, MPI_Offset len)
{
    return len > 0 ? posix_fallocate(fd, 0, len) : 0;
}

PUBLIC int MPI_File_set_size(MPI_File file, MPI_Offset len)
{
    struct shared *s = known(file);
    /* What no length is the MPI library finds, without asking anybody. */
    int ours = s && len >= 0 && !(s->amode & MPI_MODE_RDONLY);
    return ours ? first_does(s, "set_size", len, cut) : PMPI_File_set_size(file, len);
}

PUBLIC int MPI_File_preallocate(MPI_File file, MPI_Offset len)
{
    struct shared *s = known(file);
    int ours = s && len >= 0 && !(s->amode & MPI_MODE_RDONLY);
    return ours ? first_does(s, "preallocate", len, fill) : PMPI_File_preallocate(file, len);
}

PUBLIC int MPI_File_get_amode(MPI_File file, int *amode)
{
    struct shared *s = known(file);
    if (!s)
        return PMPI_File_get_amode(file, amode);
    *amode = s->amode;
    return MPI_SUCCESS;
}

PUBLIC int MPI_File_close(MPI_File *file)
{
    struct shared *s = known(*file);
    if (!s)
        return PMPI_File_close(file);
    forget(s);
    int rc = PMPI_File_close(file), error = s->fd >= 0 && close(s->fd) ? errno : 0;
    s->fd = -1;
    /* Nobody has it open any more when its name goes, and nobody comes back before: he may make it anew. */
    PMPI_Barrier(s->all);
    if (s->amode & MPI_MODE_DELETE_ON_CLOSE) {
        if (s->delete && unlink(s->delete) && errno != ENOENT && !error)
            error = errno;
        PMPI_Barrier(s->all);
    }
    if (error && rc == MPI_SUCCESS) {
        fprintf(stderr, "libebb-mpi: close: %s\n", strerror(error));
        rc = class_of(error);
    }
    if (s->verbose && rank_in(s->all) == 0)
        fprintf(stderr, "libebb-mpi: closed after %ld collective calls\n", s->calls);
    release(s);
    return rc;
}
