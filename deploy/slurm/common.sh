# Shared by the prolog and the epilog: settings, names, words to the outside. Sourced, not run.
# shellcheck shell=bash

# slurmd runs hooks without a search path.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin

fill() {
    local text=${1//%u/$SLURM_JOB_USER}
    text=${text//%j/$SLURM_JOB_ID}
    printf '%s' "${text//%n/$node}"
}

# To the node's system log and to slurmd's: where an administrator looks.
say() {
    echo "ebb: job $SLURM_JOB_ID: $*" >&2
    logger -t ebb -- "job $SLURM_JOB_ID: $*" 2>/dev/null || true
}

# Everything of a job is done as its user.
as_user() {
    if [[ $SLURM_JOB_USER == "$(id -un)" ]]; then
        "$@"
    else
        # With the user's own home, so that ~/.config/ebb/config.toml counts.
        runuser -u "$SLURM_JOB_USER" -- env "HOME=$(getent passwd "$SLURM_JOB_USER" | cut -d: -f6)" "$@"
    fi
}

settings() {
    local file=${EBB_HOOK_CONF:-/etc/ebb/ebb-hook.conf}
    # shellcheck source=deploy/slurm/ebb-hook.conf
    source "$file"
    : "${SLURM_JOB_ID:?}" "${SLURM_JOB_USER:?}"
    node=${SLURMD_NODENAME:-$(hostname -s)}
    backing=$(fill "$EBB_HOOK_BACKING")
    mount=$(fill "$EBB_HOOK_MOUNT")
    cache=$(fill "$EBB_HOOK_CACHE")
    token=$(fill "$EBB_HOOK_SHARED")/$SLURM_JOB_ID.token
    # One file for each node that may still need the token.
    members=$(fill "$EBB_HOOK_SHARED")/$SLURM_JOB_ID.nodes
    ebb=$EBB_HOOK_BIN
}

# Set for the hooks, so that a user's own variables decide nothing here.
unset EBB_CONFIG EBB_RUNTIME_DIR

is_mounted() {
    grep -qF " $mount " /proc/self/mountinfo
}
