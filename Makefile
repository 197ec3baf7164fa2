# Build, try, test and measure Ebb. Everything works in a fresh clone; as root on a Debian
# system what is missing is installed, elsewhere the message says what to install.
#
#   make demo    two nodes on this machine, each step explained (under two minutes once built)
#   make test    all tests, on real mounts
#   make test-past   those on mounts once more, with --io-path auto; some also with --tracker off
#   make test-past-core  the core of those, which .ci/run runs
#   make test-supervised  a few of those on mounts once more, under supervisors
#   make test-locks  some of those on mounts with daemons that watch the order of their locks
#   make chaos SECONDS=60 [SEED=n] [ROUNDS=n]   nodes, programs that write, and everything that can
#                break; another cluster after every n rounds
#   make bench   the benchmarks
#   make build   the binary $(TARGET)/release/ebb, and libebb_trace.so beside it for `ebb trace`
#   make mpi     libebb-mpi for the MPI libraries that are installed (docs/mpi.md)
#   make install PREFIX=DIR   what was built: ebb, libebb with its header and manual, libebb-mpi
#   make lint    format, clippy
#   make build-rdma   the binary with RDMA in it, which starts on machines without it, too
#   make test-rdma    RDMA for real, in a virtual machine that has a device (soft-RoCE)

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build
.PHONY: build mpi install demo test test-past test-past-core test-supervised test-locks chaos bench lint clean tools \
    build-rdma test-rdma lint-rdma

TARGET := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),target)

# Tests that mount start several daemons each, and mostly wait. As many programs as there are processors run at a
# time (.ci/test-suites), each with so many tests at a time; many more measure the machine.
THREADS := $(if $(EBB_TEST_THREADS),$(EBB_TEST_THREADS),2)

build: tools
	cargo build --release --workspace

mpi: build
	crates/ebb-api/mpi/build.sh $(TARGET)/release

# What `make build` (and `make mpi`) has built, below PREFIX (and DESTDIR, for who makes packages).
PREFIX := /usr/local
DIR = $(DESTDIR)$(PREFIX)
BUILT = $(TARGET)/release
VERSION = $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' Cargo.toml | head -1)
install:
	@test -e $(BUILT)/ebb -a -e $(BUILT)/libebb.so || { echo "make build first: $(BUILT) lacks ebb or libebb.so" >&2; exit 1; }
	install -d $(DIR)/bin $(DIR)/lib/pkgconfig $(DIR)/include $(DIR)/share/man/man3
	install -m 755 $(BUILT)/ebb $(BUILT)/libebb_trace.so $(DIR)/bin
	install -m 755 $(BUILT)/libebb.so $(DIR)/lib/libebb.so.$(VERSION)
	ln -sf libebb.so.$(VERSION) $(DIR)/lib/libebb.so.0
	ln -sf libebb.so.0 $(DIR)/lib/libebb.so
	install -m 644 $(BUILT)/libebb.a $(DIR)/lib
	for mpi in $(wildcard $(BUILT)/libebb-mpi-*.so); do install -m 755 $$mpi $(DIR)/lib; done
	install -m 644 crates/ebb-api/include/ebb.h $(DIR)/include
	install -m 644 docs/man/libebb.3 $(DIR)/share/man/man3
	sed 's|@PREFIX@|$(PREFIX)|; s|@VERSION@|$(VERSION)|' crates/ebb-api/libebb.pc.in > $(DIR)/lib/pkgconfig/libebb.pc

demo: build
	EBB_BIN="$$(realpath $(TARGET)/release/ebb)" demo/demo.sh

# The binaries first, because the tests of other packages run them.
test: build
	@.ci/test-tools
	EBB_REQUIRE_FUSE=1 EBB_REQUIRE_TOOLS=1 RUST_TEST_THREADS=$(THREADS) .ci/test-suites

# Tests are chosen from the whole workspace: of a package alone cargo would build much of what is below it with
# other features, once more.

# The same tests on real mounts with the kernel reading and writing past the daemon.
test-past: build
	EBB_TEST_IO_PATH=auto EBB_REQUIRE_FUSE=1 RUST_TEST_THREADS=$(THREADS) .ci/test-suites --package ebb-tests
	EBB_TEST_TRACKER=off EBB_TEST_IO_PATH=auto EBB_REQUIRE_FUSE=1 RUST_TEST_THREADS=$(THREADS) \
	    .ci/test-suites litmus programs::fsx past::passthrough past::passthrough_edges past::passthrough_kill

# The core of these, for every change.
test-past-core: build
	EBB_TEST_IO_PATH=auto EBB_REQUIRE_FUSE=1 RUST_TEST_THREADS=$(THREADS) \
	    .ci/test-suites litmus programs::fsx faults::medium recoveries::recovery survive

# Daemons under supervisors, as they are by default, in tests that are not about them.
test-supervised: build
	EBB_SUPERVISED=1 EBB_REQUIRE_FUSE=1 RUST_TEST_THREADS=$(THREADS) \
	    .ci/test-suites litmus models::leases programs::namespace_ops

# Daemons that note in which order they take their locks: what could make two threads wait for each
# other for ever is told, whether they meet or not.
LOCKS := $(TARGET)/locks
test-locks: build
	cargo test --profile locks -p ebb-locks --features order --target-dir $(LOCKS)
	cargo build --profile locks -p ebb -p ebb-locks --features ebb-locks/order --target-dir $(LOCKS)
	rm -f $(LOCKS)/told
	LOCK_ORDER_FILE="$$(realpath $(LOCKS))/told" EBB_BIN="$$(realpath $(LOCKS)/locks/ebb)" \
	    EBB_REQUIRE_FUSE=1 RUST_TEST_THREADS=$(THREADS) .ci/test-suites litmus models::leases \
	    models::quiet_writes models::seats faults::failures recoveries::recovery past::passthrough
	@! cat $(LOCKS)/told 2>/dev/null

# SECONDS is the shell's own name for its age: only a value from the command line counts.
chaos: build
	EBB_CHAOS_SECONDS=$(if $(filter command line,$(origin SECONDS)),$(SECONDS),60) \
	    $(if $(SEED),EBB_SEED=$(SEED)) $(if $(ROUNDS),EBB_CHAOS_ROUNDS=$(ROUNDS)) EBB_REQUIRE_FUSE=1 \
	    cargo test --release --workspace --test chaos -- --ignored --nocapture

bench: build
	EBB_REQUIRE_FUSE=1 cargo bench --workspace

lint: tools
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --release -- -D warnings

# One binary: the libraries are loaded when they are needed.
build-rdma: tools
	.ci/rdma-tools
	cargo build --release --workspace --features ebb/rdma

test-rdma: build-rdma
	tests/rdma/run

# What the feature adds, and its tests that need no device.
lint-rdma:
	.ci/rdma-tools
	cargo clippy -p ebb-rdma -p ebb-transport --all-targets --features ebb-rdma/verbs,ebb-transport/rdma --release \
	    --target-dir $(TARGET)/rdma -- -D warnings
	cargo test -p ebb-rdma --features verbs --release --target-dir $(TARGET)/rdma

clean:
	cargo clean

tools:
	@.ci/tools
