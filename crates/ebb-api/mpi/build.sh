#!/usr/bin/env bash
# Builds libebb-mpi for each MPI library that is installed: libebb-mpi-mpich.so, libebb-mpi-openmpi.so, beside
# libebb.so in the directory that is given.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
into=${1:?directory with libebb.so}
test -e "$into/libebb.so" || { echo "make build first: $into has no libebb.so" >&2; exit 1; }
built=0
for mpi in mpich openmpi; do
    compiler=mpicc.$mpi
    command -v "$compiler" >/dev/null || continue
    # Found beside itself, wherever both are installed.
    "$compiler" -std=gnu11 -O2 -Wall -Wextra -Werror -fPIC -shared -fvisibility=hidden -I"$here/../include" \
        -Wl,-soname,"libebb-mpi-$mpi.so.0" -Wl,-rpath,'$ORIGIN' -o "$into/libebb-mpi-$mpi.so" \
        "$here/ebb_mpi.c" -L"$into" -lebb
    echo "built $into/libebb-mpi-$mpi.so"
    built=1
done
((built)) || { echo "neither mpicc.mpich nor mpicc.openmpi is there: apt-get install mpich" >&2; exit 1; }
