#!/bin/sh
# Runs one MPI rank on "its node": in a mount namespace of its own, in which $EBB_JOB is the mount
# of the node that the rank belongs to. Ranks fill the nodes in blocks, as a scheduler places them.
#   EBB_JOB    the path that all ranks use
#   EBB_MOUNTS the nodes' mounts, separated by spaces
set -eu
set -- "$@"
nodes=$(echo "$EBB_MOUNTS" | wc -w)
node=$((PMI_RANK * nodes / PMI_SIZE + 1))
EBB_MOUNT=$(echo "$EBB_MOUNTS" | cut -d ' ' -f "$node")
export EBB_MOUNT
exec unshare --mount --propagation private \
    sh -euc 'mount --bind "$EBB_MOUNT" "$EBB_JOB"; exec "$@"' rank "$@"
