/*
 * libebb: what a parallel program can ask of a mount of Ebb beside what every file system has.
 * docs/libebb.md explains it; libebb(3) is the same as a manual page.
 *
 * Functions return -1 and set errno when they fail; a range is an offset and a length.
 *   ENOTTY   the file is not on a mount of Ebb (or its daemon is too old)
 *   EBADF    it was not opened for what is asked: to publish or give up bytes is to write
 *   EINVAL   a range that no file can have
 *   ENOTCONN the daemon has ended
 * They may be called from any thread, and keep no state.
 */
#ifndef EBB_H
#define EBB_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The owner of bytes that nobody has attached: they are the backing's. */
#define EBB_NOBODY 0u

/* Length of a handle. */
#define EBB_HANDLE_SIZE 64

/* Bytes and the number of the node that attached them last. */
struct ebb_owner {
    uint64_t offset;
    uint64_t len;
    uint32_t node;
    uint32_t reserved;
};

struct ebb_stat {
    uint64_t size;       /* as the metadata service has it now */
    uint64_t unattached; /* bytes that were written on this node and not published */
    uint64_t unflushed;  /* bytes that were written on this node and are not on the backing */
    uint32_t node;       /* the number of this node */
    uint32_t reserved;
};

/* A piece of a list: where it is in the file, and in memory. */
struct ebb_piece {
    uint64_t offset;
    void *data;
    size_t len;
};

const char *ebb_version(void);

/*
 * The primitives of BaseFS. Any descriptor of a file of a mount will do; ebb_open also checks that it is
 * one. Under the model `session` nothing is published between ebb_open and ebb_close but by ebb_attach, and
 * nothing is looked up but by ebb_query.
 */
int ebb_open(const char *path, int flags, mode_t mode);
int ebb_close(int fd);

/* Into this node's buffer; how many bytes. */
ssize_t ebb_write(int fd, const void *data, size_t len, uint64_t offset);

/* The bytes as their owner has them. ESTALE: they are not all that owner's (any more). */
ssize_t ebb_read(int fd, void *data, size_t len, uint64_t offset, uint32_t owner);

int64_t ebb_seek(int fd, int64_t offset, int whence);
int64_t ebb_tell(int fd);

/* Publishes what was written on this node. ENODATA: some of the range never was. */
int ebb_attach(int fd, uint64_t offset, uint64_t len);
int ebb_attach_file(int fd);

/* Who owns what, in order; what is missing is nobody's. Fills in `n` of them and returns how many there are. */
ssize_t ebb_query(int fd, uint64_t offset, uint64_t len, struct ebb_owner *owners, size_t n);
ssize_t ebb_query_file(int fd, struct ebb_owner *owners, size_t n);

/* Gives up what was attached, after flushing it. ENODATA: some of the range never was. */
int ebb_detach(int fd, uint64_t offset, uint64_t len);
int ebb_detach_file(int fd);

/* Copies to the backing what was written on this node. */
int ebb_flush(int fd, uint64_t offset, uint64_t len);
int ebb_flush_file(int fd);

int ebb_stat(int fd, struct ebb_stat *stat);

/*
 * Lists: many pieces in a few requests, under every model. Where pieces of a write meet, a later one
 * counts; pieces of a read must not meet in memory. `got` may be NULL. Return how many bytes it was.
 */
ssize_t ebb_writex(int fd, const struct ebb_piece *pieces, size_t n);
ssize_t ebb_readx(int fd, const struct ebb_piece *pieces, size_t n, size_t *got);

/*
 * Handles: stand for the file on every node of the job. ENOKEY: the job has no token. To open one takes the
 * mount point of this node, and the permissions of the file; EACCES also when nobody of the job made it.
 */
int ebb_handle_get(int fd, unsigned char handle[EBB_HANDLE_SIZE]);
int ebb_handle_open(const char *mount, const unsigned char handle[EBB_HANDLE_SIZE], int flags);

/* A path that stands for the file, for libraries that want one; how long it is. ERANGE: longer than `len`. */
ssize_t ebb_handle_path(const char *mount, const unsigned char handle[EBB_HANDLE_SIZE], char *path, size_t len);

/*
 * Exchanges: directories whose files are buffers that some programs put and others get, once (docs/coupling.md).
 * ebb_exchange opens one; with `terms` ("producers=1 consumers=1 keep=none wait=30s") it makes it where there is
 * none. ENODATA: there is none. ENOTEMPTY: the directory has files, and is none.
 */
int ebb_exchange(const char *path, const char *terms);

/*
 * Puts a part of a buffer, as one of so many producers; 0: of as many as the exchange says. When all of them have,
 * it can be got. EEXIST: it has all of them. EINVAL: others have said that there are more. EIO: one of them died;
 * unlink it, and put it anew. ESTALE: it was removed meanwhile.
 */
int ebb_put(int exchange, const char *name, const void *data, size_t len, uint64_t offset,
            uint32_t participants);
int ebb_putx(int exchange, const char *name, const struct ebb_piece *pieces, size_t n, uint32_t participants);

/*
 * Waits for a buffer and gets a part of it, as one of so many consumers; 0: of as many as the exchange says. After
 * the last one it is released. ETIMEDOUT: its producers did not come. EIO: one of them died. EINTR: a signal.
 * EUSERS: it has all its consumers. `got` may be NULL. Return how many bytes it was.
 */
ssize_t ebb_get(int exchange, const char *name, void *data, size_t len, uint64_t offset,
                uint32_t participants);
ssize_t ebb_getx(int exchange, const char *name, const struct ebb_piece *pieces, size_t n, size_t *got,
                 uint32_t participants);

/* PosixFS, CommitFS and SessionFS, over files of a mount under `session`. */
ssize_t ebb_posix_write(int fd, const void *data, size_t len, uint64_t offset);
ssize_t ebb_posix_read(int fd, void *data, size_t len, uint64_t offset);

ssize_t ebb_commit_write(int fd, const void *data, size_t len, uint64_t offset);
ssize_t ebb_commit_read(int fd, void *data, size_t len, uint64_t offset);
int ebb_commit(int fd);

ssize_t ebb_session_write(int fd, const void *data, size_t len, uint64_t offset);
ssize_t ebb_session_read(int fd, void *data, size_t len, uint64_t offset);
int ebb_session_open(int fd);
int ebb_session_close(int fd);

#ifdef __cplusplus
}
#endif
#endif
