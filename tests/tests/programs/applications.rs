//! Programs that people run, on real mounts. After each the mount is taken away and the backing
//! must hold exactly what the mount showed.
//!
//! EBB_APPS_SCALE: how many times the work of the short form.

use ebb_testkit::Cluster;
use ebb_tests::grown::grow;
use ebb_tests::model::Model;
use ebb_tests::tools::{self, shell};
use ebb_tests::tree;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(600);
const SEED: u64 = 7_411;

fn scale() -> usize {
    tools::amount("EBB_APPS_SCALE", 1) as usize
}

/// What a program works with: its directory in the mount, and a local one.
struct Scene<'a> {
    mount: &'a Path,
    local: &'a Path,
}

/// Runs `program` on a mount of one node, then compares the backing with a local copy of what the
/// mount showed at the end.
fn on_mount(model: Model, programs: &[&str], program: fn(&Scene)) {
    if !tools::available(programs) {
        return;
    }
    let cluster = Cluster::builder().nodes(1).consistency(model.name()).start();
    let scratch = tempfile::tempdir().expect("tempdir");
    let (local, copy) = (scratch.path().join("local"), scratch.path().join("copy"));
    fs::create_dir(&local).expect("mkdir");
    fs::create_dir(&copy).expect("mkdir");
    let mount = cluster.nodes()[0].path("");
    program(&Scene { mount: &mount, local: &local });
    shell(&mount, &format!("cp -a . '{}'", copy.display()), LIMIT);
    tree::assert_same("a copy of the mount", &copy, &mount);
    cluster.nodes()[0].umount();
    tree::assert_same("the backing after umount", cluster.backing(), &copy);
}

macro_rules! on_models {
    ($name:ident, $programs:expr, $program:path: $($model:ident)*) => {
        mod $name {
            $(#[test]
            #[allow(non_snake_case)]
            fn $model() {
                super::on_mount(super::Model::$model, &$programs, $program);
            })*
        }
    };
}

on_models!(git, ["git"], super::git_session: Posix Commit Session);
on_models!(sqlite_rollback, ["sqlite3"], super::sqlite_rollback_journal: Posix Commit Session);
on_models!(sqlite_wal, ["sqlite3"], super::sqlite_write_ahead_log: Posix Commit Session);
on_models!(gcc_make, ["gcc", "make"], super::build_c_project: Posix Commit Session);
on_models!(tar, ["tar"], super::tar_there_and_back: Posix Commit Session);
on_models!(rsync, ["rsync"], super::rsync_twice: Posix Commit Session);
on_models!(coreutils, ["cp", "rm", "find", "ls"], super::copy_list_remove: Posix);

/// Some hundred objects (a few thousand at scale 5): commits, branches, merge, clones both ways, gc, fsck.
fn git_session(s: &Scene) {
    grow(s.local, SEED, 200 * scale()).expect("grow");
    let script = format!(
        r#"
export HOME="$PWD" GIT_CONFIG_NOSYSTEM=1
git config --global user.email tests@example.org
git config --global user.name tests
git config --global init.defaultBranch main
git config --global gc.autoDetach false
git init -q repo
cd repo
cp -a '{local}'/. .
git add -A && git commit -qm first
for branch in a b; do
    git checkout -qb $branch main
    for n in $(seq 1 {branch}); do echo "$branch $n" > "$branch-$n.txt"; done
    git add -A && git commit -qm "$branch"
done
git checkout -q main
git merge -q --no-edit a && git merge -q --no-edit b
git fsck --full --strict
git clone -q . ../clone
git clone -q --no-hardlinks . '{local}-clone'
git gc -q --aggressive --prune=now
git fsck --full --strict
test -z "$(git status --porcelain)"
for other in ../clone '{local}-clone'; do
    test "$(git rev-parse HEAD^{{tree}})" = "$(git -C $other rev-parse HEAD^{{tree}})"
    test -z "$(git -C $other status --porcelain)"
    git -C $other fsck --full
done
"#,
        local = s.local.display(),
        branch = 60 * scale()
    );
    shell(s.mount, &script, LIMIT);
}

fn sqlite(s: &Scene, mode: &str, transactions: usize) {
    let mut sql = format!(
        "PRAGMA journal_mode={mode};\n\
         CREATE TABLE t (id INTEGER PRIMARY KEY, who TEXT, amount INTEGER);\n\
         CREATE INDEX by_who ON t (who);\n"
    );
    for n in 0..transactions {
        sql += &format!("INSERT INTO t VALUES ({n}, 'user {}', {});\n", n * 7919 % 101, n % 13);
        if n % 10 == 9 {
            sql += &format!("UPDATE t SET amount = amount + 1 WHERE id % 97 = {};\n", n % 97);
        }
        if n % 25 == 24 {
            sql += &format!("BEGIN; DELETE FROM t WHERE id % 3 = {}; ROLLBACK;\n", n % 3);
        }
    }
    sql += "PRAGMA integrity_check;\nSELECT count(*), sum(amount) FROM t;\n";
    let (script, reference) = (s.local.join("work.sql"), s.local.join("reference.db"));
    fs::write(&script, sql).expect("write");
    let on = |db: &Path| {
        let command = format!("sqlite3 -bail '{}' < '{}'", db.display(), script.display());
        shell(s.mount, &command, LIMIT)
    };
    let (got, want) = (on(&s.mount.join("test.db")), on(&reference));
    assert_eq!(got, want, "sqlite on the mount and on a local directory");
    assert!(got.contains("\nok\n"), "integrity check: {got}");
    // Another process, so that nothing comes from a cache of the first one.
    let again = shell(s.mount, "sqlite3 test.db 'PRAGMA integrity_check; VACUUM'", LIMIT);
    assert_eq!(again, "ok\n");
}

fn sqlite_rollback_journal(s: &Scene) {
    sqlite(s, "DELETE", 250 * scale());
}

fn sqlite_write_ahead_log(s: &Scene) {
    sqlite(s, "WAL", 800 * scale());
}

/// Twenty source files, a library, an incremental rebuild, and the program run from the mount.
fn build_c_project(s: &Scene) {
    let script = r#"
mkdir -p src include build
for n in $(seq 1 20); do
    echo "int f$n(int x);" >> include/all.h
    printf '#include "all.h"\nint f%s(int x) { return x * %s; }\n' $n $n > src/f$n.c
done
{
    printf '#include <stdio.h>\n#include "all.h"\nint main(void) { int s = 0;\n'
    for n in $(seq 1 20); do echo "    s += f$n(2);"; done
    printf '    printf("%%d\\n", s); return 0; }\n'
} > src/main.c
cat > Makefile <<'END'
OBJECTS := $(patsubst src/%.c,build/%.o,$(wildcard src/f*.c))
program: build/main.o liball.a
	gcc -g -o $@ build/main.o -L. -lall
liball.a: $(OBJECTS)
	rm -f $@ && ar rcs $@ $^
build/%.o: src/%.c include/all.h
	gcc -g -Og -Wall -Werror -Iinclude -c -o $@ $<
END
make -s -j2
test "$(./program)" = 420
make -q
sed -i 's/x \* 20/x * 30/' src/f20.c
make -s -j2
test "$(./program)" = 440
"#;
    shell(s.mount, script, LIMIT);
}

fn tar_there_and_back(s: &Scene) {
    grow(s.local, SEED + 1, 250 * scale()).expect("grow");
    let script = format!(
        r#"
tar -C '{local}' -cf all.tar .
mkdir out
tar -C out -xpf all.tar
tar -C out --compare -f all.tar
tar -C out -cf - . | tar -C '{local}' --compare -f -
tar -C out -czf again.tar.gz . && tar -tzf again.tar.gz > list && test -s list
"#,
        local = s.local.display()
    );
    shell(s.mount, &script, LIMIT);
    tree::assert_same("extracted", &s.mount.join("out"), s.local);
}

fn rsync_twice(s: &Scene) {
    grow(s.local, SEED + 2, 250 * scale()).expect("grow");
    let local = s.local.display();
    shell(s.mount, &format!("mkdir there && rsync -aH --delete '{local}/' there/"), LIMIT);
    let check = format!("rsync -naHc --delete --itemize-changes '{local}/' there/");
    assert_eq!(shell(s.mount, &check, LIMIT), "", "after the first rsync");
    let change = "rm -rf \"$(ls -d dir* | head -1)\"; for f in file-1*.dat; do echo more >> $f; done; \
                  mkdir new && echo new > new/file; chmod 700 new";
    shell(s.local, change, LIMIT);
    shell(s.mount, &format!("rsync -aH --delete '{local}/' there/"), LIMIT);
    assert_eq!(shell(s.mount, &check, LIMIT), "", "after the second rsync");
    tree::assert_same("there", &s.mount.join("there"), s.local);
    let back = s.local.with_extension("back");
    shell(s.mount, &format!("rsync -aH there/ '{}/'", back.display()), LIMIT);
    tree::assert_same("back again", &back, s.local);
}

/// `find` and `ls` tell the same as for a local directory, up to what directories cost.
fn copy_list_remove(s: &Scene) {
    grow(s.local, SEED + 3, 250 * scale()).expect("grow");
    shell(s.mount, &format!("cp -a '{}' tree", s.local.display()), LIMIT);
    let tree = s.mount.join("tree");
    let find = r"find . -mindepth 1 \( -type d -printf '%P %y %m %U:%G\n' \) -o \
        -printf '%P %y %m %U:%G %n %s %l %T@\n' | LC_ALL=C sort";
    assert_eq!(shell(&tree, find, LIMIT), shell(s.local, find, LIMIT), "find");
    let ls = r#"LC_ALL=C ls -lR --time-style=full-iso | awk '/^total/ { next }
        /^d/ { $2 = ""; $5 = "" } { print }'"#;
    assert_eq!(shell(&tree, ls, LIMIT), shell(s.local, ls, LIMIT), "ls -lR");
    shell(
        s.mount,
        "cp -a tree second && diff -r --no-dereference tree second && mv second third",
        LIMIT,
    );
    tree::assert_same("a copy within the mount", &s.mount.join("third"), s.local);
    shell(s.mount, "rm -rf third && test ! -e third && mkdir third && rmdir third", LIMIT);
    shell(s.mount, "du -s --apparent-size . && df . && find . -name '*.dat' -delete", LIMIT);
}

/// Locks, the rollback journal and the page cache of two nodes at once.
#[test]
fn two_nodes_share_a_sqlite_database_under_posix() {
    if !tools::available(&["sqlite3"]) {
        return;
    }
    const EACH: u32 = 60;
    let cluster = Cluster::builder().nodes(2).consistency("posix").start();
    let roots: Vec<_> = cluster.nodes().iter().map(|n| n.path("")).collect();
    let create = "sqlite3 s.db 'CREATE TABLE c (n INTEGER); INSERT INTO c VALUES (0); \
                  CREATE TABLE log (who INTEGER, n INTEGER)'";
    shell(&roots[0], create, LIMIT);
    std::thread::scope(|threads| {
        for (who, root) in roots.iter().enumerate() {
            threads.spawn(move || {
                let script = format!(
                    "for i in $(seq {EACH}); do sqlite3 -cmd '.timeout 60000' s.db \
                     \"BEGIN IMMEDIATE; UPDATE c SET n = n + 1; \
                     INSERT INTO log VALUES ({who}, $i); COMMIT\"; done"
                );
                shell(root, &script, LIMIT);
            });
        }
    });
    for root in &roots {
        let query = "sqlite3 s.db 'PRAGMA integrity_check; SELECT n FROM c; \
                     SELECT who, count(*), sum(n) FROM log GROUP BY who'";
        let sum = EACH * (EACH + 1) / 2;
        let want = format!("ok\n{}\n0|{EACH}|{sum}\n1|{EACH}|{sum}\n", 2 * EACH);
        assert_eq!(shell(root, query, LIMIT), want);
    }
}

/// PostgreSQL's programs live outside PATH on Debian.
fn postgres_programs() -> Option<std::path::PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").ok()?;
    let mut found: Vec<_> = versions.flatten().map(|v| v.path().join("bin")).collect();
    found.sort();
    found.into_iter().rev().find(|bin| bin.join("initdb").is_file())
}

#[test]
fn postgres_initdb_pgbench_checksums_under_posix() {
    let Some(programs) = postgres_programs() else {
        assert!(
            !std::env::var("EBB_REQUIRE_TOOLS").is_ok_and(|v| v == "1"),
            "missing: /usr/lib/postgresql/*/bin/initdb"
        );
        println!("SKIPPED: no /usr/lib/postgresql/*/bin/initdb");
        return;
    };
    // SAFETY: no arguments, no failure.
    if unsafe { libc::geteuid() } != 0 {
        println!("SKIPPED: only root may become the user postgres");
        return;
    }
    let cluster = Cluster::builder().nodes(1).consistency("posix").prepare();
    cluster.node(0).mount_with(&["--allow-other"]);
    let mount = cluster.node(0).path("");
    let scratch = tempfile::tempdir().expect("tempdir");
    for dir in [&mount, cluster.backing(), scratch.path()] {
        let private = dir.ancestors().filter(|d| d.starts_with(std::env::temp_dir()));
        for d in private.filter(|d| *d != std::env::temp_dir()) {
            let mode = fs::metadata(d).expect("stat").permissions().mode();
            fs::set_permissions(d, fs::Permissions::from_mode(mode | 0o755)).expect("chmod");
        }
    }
    let script = format!(
        r#"
export PATH='{programs}':$PATH
run='{scratch}/run'
install -d -o postgres -g postgres "$run" data
as() {{ runuser -u postgres -- "$@"; }}
as initdb -D data -k -A trust > /dev/null
as pg_ctl -D data -w -l "$run/log" -o "-k $run -c listen_addresses=" start > /dev/null || {{ cat "$run/log"; exit 1; }}
trap 'as pg_ctl -D data -m immediate stop > /dev/null || true' EXIT
export PGHOST="$run"
as createdb bench
as pgbench -q -i -s 1 bench
as pgbench -c 4 -j 2 -t 100 bench
as psql -q bench -c 'CREATE EXTENSION amcheck'
as pg_amcheck --heapallindexed --parent-check bench
as psql -qAt bench -c 'SELECT sum(abalance) = (SELECT sum(delta) FROM pgbench_history), (SELECT count(*) FROM pgbench_history) FROM pgbench_accounts' | tee "$run/sums"
test "$(cat "$run/sums")" = 't|400'
trap - EXIT
as pg_ctl -D data -m fast -w stop > /dev/null
as pg_checksums --check -D data
"#,
        programs = programs.display(),
        scratch = scratch.path().display()
    );
    println!("{}", shell(&mount, &script, LIMIT));
    let copy = scratch.path().join("copy");
    fs::create_dir(&copy).expect("mkdir");
    shell(&mount, &format!("cp -a . '{}'", copy.display()), LIMIT);
    cluster.nodes()[0].umount();
    tree::assert_same("the backing after umount", cluster.backing(), &copy);
    let check =
        format!("runuser -u postgres -- '{}'/pg_checksums --check -D data", programs.display());
    shell(cluster.backing(), &check, LIMIT);
}
