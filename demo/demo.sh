#!/usr/bin/env bash
# Two nodes on this machine share a job's files: a checkpoint is written by both, drains while
# the "application" computes, is read across nodes, and is compared at the end. Each step says
# what it does and what just happened. Needs the binary in EBB_BIN (`make demo` sets it).
set -euo pipefail

ebb=${EBB_BIN:-$(dirname "$0")/../target/release/ebb}
ebb=$(realpath "$ebb")
[[ -x $ebb ]] || { echo "no binary $ebb: run \`make build\` first, or \`make demo\`" >&2; exit 1; }
[[ -e /dev/fuse ]] || { echo "no /dev/fuse here: nothing can be mounted" >&2; exit 1; }

top=$(mktemp -d "${TMPDIR:-/tmp}/ebb-demo.XXXXXX")
export EBB_RUNTIME_DIR=$top/run
pfs=$top/pfs a=$top/nodeA b=$top/nodeB
mkdir "$pfs" "$a" "$b"

# However this ends, nothing stays mounted and the directory goes.
finish() {
    local status=$?
    trap - EXIT INT TERM
    for node in "$b" "$a"; do
        if grep -qs " $node " /proc/self/mountinfo; then
            "$ebb" umount --no-drain "$node" >/dev/null 2>&1 || umount -l "$node" 2>/dev/null || true
        fi
    done
    if grep -qs " $top/" /proc/self/mountinfo; then
        echo "still mounted, kept: $top" >&2
    else
        rm -rf "$top"
    fi
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

bold="" plain=""
[[ -t 1 ]] && bold=$(tput bold 2>/dev/null || true) && plain=$(tput sgr0 2>/dev/null || true)
step=0
step() { step=$((step + 1)); printf '\n%s[%d] %s%s\n' "$bold" "$step" "$*" "$plain"; }
run() { printf '    $ %s\n' "${*//$top/\$TOP}"; "$@" 2>&1 | sed "s|$top|\$TOP|g; s/^/      /"; }
note() { printf '    -> %s\n' "$*"; }
# One value of `ebb status --json`, of those that are not within others.
text() { "$ebb" status --json "$1" | sed -n "s/^  \"$2\": \"\(.*\)\",*$/\1/p"; }
number() {
    local value
    value=$("$ebb" status --json "$1" | sed -n "s/^  \"$2\": \(.*[^,]\),*$/\1/p")
    [[ $value =~ ^[0-9]+$ ]] || { echo "ebb status --json $1: \"$2\" is not one number: '$value'" >&2; exit 1; }
    echo "$value"
}

ranks=4 records=12 record_kib=256
total=$((ranks * records * record_kib))

echo "A parallel file system is played by \$TOP/pfs, two compute nodes by two daemons."
echo "TOP=$top"

step "Mount on node A: the daemon, with the job's metadata service inside"
run "$ebb" mount --consistency session --node A --cache "$top/cacheA" "$pfs" "$a"
meta=$(text "$a" meta)
note "what is written below nodeA now lands in A's own buffer ($(df -h --output=fstype "$top" | tail -1)), not on the parallel file system"

step "Mount on node B, which joins A's metadata service"
run "$ebb" mount --consistency session --node B --cache "$top/cacheB" --meta "$meta" "$pfs" "$b"
note "both nodes show the same files; under 'session' bytes become visible at close, for those who open afterwards"

# The expected content, made without Ebb: record r of rank k is filled with a line that names both.
record() {
    # head ends the endless line on purpose: yes dies of SIGPIPE.
    { yes "rank $1 record $2" || true; } 2>/dev/null | head -c $((record_kib * 1024))
}
expected=$top/expected
for ((r = 0; r < records; r++)); do
    for ((k = 0; k < ranks; k++)); do record "$k" "$r"; done
done >"$expected"

step "Checkpoint: $ranks ranks, two on each node, write ONE file in interleaved records of $record_kib KiB"
: >"$a/checkpoint.0001"
began=$(date +%s%N)
for ((k = 0; k < ranks; k++)); do
    node=$a
    ((k % 2 == 0)) || node=$b
    (
        for ((r = 0; r < records; r++)); do
            record "$k" "$r" | dd of="$node/checkpoint.0001" bs=${record_kib}K iflag=fullblock \
                seek=$((r * ranks + k)) conv=notrunc status=none
        done
    ) &
done
wait
note "$total KiB in $((($(date +%s%N) - began) / 1000000)) ms; every process wrote to its own node's buffer, nobody waited for the parallel file system"
run sh -c "'$ebb' status '$a' | head -8"
note "dirty, so only in the buffers: $(number "$a" dirty_bytes) bytes on A, $(number "$b" dirty_bytes) bytes on B"

step "Compute phase: the ranks do no I/O, so the flusher drains on its own (after 1 s of silence)"
waited=0
while true; do
    on_a=$(number "$a" dirty_bytes)
    on_b=$(number "$b" dirty_bytes)
    ((on_a + on_b > 0)) || break
    sleep 0.5
    waited=$((waited + 1))
    if ((waited > 120)); then
        echo "the buffers did not drain within a minute" >&2
        exit 1
    fi
done
run "$ebb" status "$a"
note "dirty is 0 on both nodes now, after about $((waited / 2)) s of computing; nobody called for it"

step "Read the checkpoint on the OTHER nodes: each sees what both have written"
run cmp "$b/checkpoint.0001" "$expected"
run cmp "$a/checkpoint.0001" "$expected"
note "identical; B fetched $(number "$b" fetched_bytes_peer) bytes from A's buffer and $(number "$b" fetched_bytes_backing) from the parallel file system"

step "Ordinary tools work, on names that only exist in the job so far"
run sh -c "mkdir $a/results && echo 'residual 1e-9' > $a/results/log.tmp && mv $a/results/log.tmp $a/results/log"
run ls -l "$b/results"
note "B lists what A has just renamed; names and attributes are the same everywhere at once"

step "Unmount: drains the rest, verifies it, and only then says 0"
run "$ebb" umount "$b"
run "$ebb" umount "$a"
note "exit status 0 means: every byte was written, synced, read back and compared"

step "What is on the parallel file system now"
run find "$pfs" -type f -printf '%P  %s bytes\n'
run cmp "$pfs/checkpoint.0001" "$expected"
echo 'residual 1e-9' >"$top/expected.log"
run cmp "$pfs/results/log" "$top/expected.log"
printf '\n%sDone: the checkpoint on the parallel file system is byte for byte what the ranks wrote.%s\n' "$bold" "$plain"
