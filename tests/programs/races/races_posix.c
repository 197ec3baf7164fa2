/* Small programs of parents and children, each with a race or without one: `races_posix NAME FILE`. */
#include "races.h"
#include <spawn.h>
#include <sys/prctl.h>

extern char **environ;

static void open_read(void)
{
    int fd = opened(O_RDWR | O_CREAT);
    get(fd, 0, 10);
    close(fd);
}

static void child(void (*work)(void))
{
    pid_t pid = fork();
    NEEDS(pid >= 0);
    if (pid == 0) {
        work();
        exit(0);
    }
}

static void reaped(void)
{
    int status;
    NEEDS(wait(&status) > 0 && status == 0);
}

static void child_reads(void)
{
    write_close();
    child(open_read);
    reaped();
}

static void parent_writes_after_fork(void)
{
    child(open_read);
    write_close();
    reaped();
}

static void children_write(void)
{
    child(write_close);
    child(write_close);
    reaped();
    reaped();
}

static void write_second_half(void)
{
    int fd = opened(O_RDWR | O_CREAT);
    put(fd, 10, 10, 'y');
    close(fd);
}

static void children_write_halves(void)
{
    child(write_close);
    child(write_second_half);
    reaped();
    reaped();
}

static void parent_waits(void)
{
    child(write_close);
    reaped();
    open_read();
}

static void parent_does_not_wait(void)
{
    child(write_close);
    open_read();
    reaped();
}

static void write_and_leave(void)
{
    put(opened(O_RDWR | O_CREAT), 0, 10, 'x');
}

static void closed_by_the_end(void)
{
    child(write_and_leave);
    reaped();
    open_read();
}

static void parent_keeps_it_open(void)
{
    int fd = opened(O_RDWR | O_CREAT);
    child(write_close);
    reaped();
    get(fd, 0, 10);
    close(fd);
}

static void read_stream(void)
{
    char bytes[10];
    FILE *file = fopen(path, "r");
    NEEDS(file && fread(bytes, 1, 10, file) == 10);
    fclose(file);
}

static void stream_is_closed(void)
{
    FILE *file = fopen(path, "w");
    NEEDS(file && fprintf(file, "0123456789") == 10 && fclose(file) == 0);
    child(read_stream);
    reaped();
}

static void stream_is_only_flushed(void)
{
    FILE *file = fopen(path, "w");
    NEEDS(file && fwrite("0123456789", 1, 10, file) == 10 && fflush(file) == 0);
    child(read_stream);
    reaped();
    fclose(file);
}

static void shell(const char *script)
{
    char command[4200];
    snprintf(command, sizeof command, script, path);
    NEEDS(system(command) == 0);
}

static void system_reads(void)
{
    write_close();
    shell("cat '%s' >/dev/null");
}

static void shell_writes(void)
{
    shell("echo 0123456789 >'%s'");
    open_read();
}

static void shell_in_the_background(void)
{
    /* There are bytes to read already, for a read that finds none is no race; and it is waited for, for the trace
     * lacks what orphans of a program do after its end. */
    write_close();
    NEEDS(prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
    shell("(echo 0123456789 1<>'%s') & :");
    open_read();
    reaped();
}

static void another_program(void)
{
    pid_t pid;
    char *arguments[] = {"cat", (char *)path, NULL};
    write_close();
    NEEDS(posix_spawnp(&pid, "cat", NULL, NULL, arguments, environ) == 0);
    reaped();
}

static void turn(void)
{
    int fd = opened(O_RDWR | O_CREAT);
    NEEDS(flock(fd, LOCK_EX) == 0);
    put(fd, 0, 10, get(fd, 0, 10) + 1);
    close(fd);
}

static void children_take_turns(void)
{
    child(turn);
    child(turn);
    reaped();
    reaped();
}

static void map_and_write(void)
{
    int fd = opened(O_RDWR);
    char *at = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    NEEDS(at != MAP_FAILED);
    at[0] = 'y';
    NEEDS(munmap(at, 4096) == 0);
    close(fd);
}

static void mapping_against_read(void)
{
    write_close();
    child(map_and_write);
    open_read();
    reaped();
}

static void copy_is_closed(void)
{
    int fd = opened(O_RDWR | O_CREAT), copy = dup(fd);
    put(copy, 0, 10, 'x');
    close(copy);
    child(open_read);
    reaped();
    close(fd);
}

#define CASE(name) {#name, name}
static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {
    CASE(child_reads), CASE(parent_writes_after_fork), CASE(children_write), CASE(children_write_halves),
    CASE(parent_waits), CASE(parent_does_not_wait), CASE(closed_by_the_end), CASE(parent_keeps_it_open),
    CASE(stream_is_closed), CASE(stream_is_only_flushed), CASE(system_reads), CASE(shell_writes),
    CASE(shell_in_the_background), CASE(another_program), CASE(children_take_turns),
    CASE(mapping_against_read), CASE(copy_is_closed),
};

int main(int argc, char **argv)
{
    NEEDS(argc == 3);
    path = argv[2];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (strcmp(cases[i].name, argv[1]) == 0) {
            cases[i].run();
            return 0;
        }
    }
    fprintf(stderr, "no program %s\n", argv[1]);
    return 9;
}
