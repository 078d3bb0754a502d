# Braid's one entry: build, install, test, demonstrate, measure.
#
#   make && make install        with the PostgreSQL that pg_config belongs to
#   make test [PG_CONFIG=...]   what every change has to pass; installs what is missing first;
#                               SUITES="regress tap" for some of it
#   make test-all               every test on every major, with new seeds: hours
#   make soak                   rare faults, for SOAK_MINUTES each
#   make demo [KEEP=1]          three writable nodes that converge, before your eyes
#
# The library is built by cargo; PGXS says where things go.

ifeq ($(PG_CONFIG),)
# Not exported: set-up may bring a better default. scripts/server.sh has the same.
PG_CONFIG := $(or $(wildcard /usr/lib/postgresql/15/bin/pg_config),$(shell command -v pg_config),pg_config)
else
override PG_CONFIG := $(or $(shell command -v $(PG_CONFIG)),$(PG_CONFIG))
export PG_CONFIG
endif

CARGO ?= $(or $(shell command -v cargo),$(wildcard $(HOME)/.cargo/bin/cargo),cargo)
export CARGO
# pgrx asks for a newer Rust than it needs. scripts/setup sees to the Rust that is needed.
cargo_flags := --locked --ignore-rust-version

major := $(shell $(PG_CONFIG) --version 2>/dev/null | sed -E 's/^[^0-9]*([0-9]+).*/\1/')
target_base := $(abspath $(or $(CARGO_TARGET_DIR),target))
# One target directory for each major version: they share no artefact that depends on the bindings.
target := $(target_base)/pg$(major)
library := $(target)/braid.so

EXTENSION = extension/braid
DATA = $(wildcard extension/sql/*.sql)

PGXS := $(wildcard $(shell $(PG_CONFIG) --pgxs 2>/dev/null))
ifneq ($(PGXS),)
include $(PGXS)
# An ordinary user installs through sudo where the directories are not that user's.
ifeq ($(DESTDIR),)
sudo := $(shell [ -w "$(pkglibdir)" ] && [ -w "$(datadir)/extension" ] || [ "$$(id -u)" = 0 ] || echo sudo)
endif
ifneq ($(sudo),)
INSTALL := sudo $(install_bin)
MKDIR_P := sudo $(MKDIR_P)
endif
else
all install uninstall:
	@echo "make: '$(PG_CONFIG)' does not lead to PostgreSQL's server headers: run 'make setup', or name another pg_config with PG_CONFIG=..." >&2; exit 1
clean:
endif

.DEFAULT_GOAL := all
.PHONY: setup test unit regress tap lint demo bench soak check-versions test-installed demo-installed bench-installed bench-profile-installed soak-installed

rust_sources := $(shell find crates decoder bgworker extension -name target -prune -o \( -name '*.rs' -o -name Cargo.toml \) -print) Cargo.toml Cargo.lock

# A file target, so that `sudo make install` after `make` needs no cargo of root's own.
$(library): $(rust_sources)
	CARGO_TARGET_DIR=$(target) PGRX_PG_CONFIG_PATH=$(PG_CONFIG) \
	    $(CARGO) build --release $(cargo_flags) -p braid --no-default-features --features pg$(major)
	cp $(target)/release/libbraid.so $@.new
	mv $@.new $@

all: $(library)

install: install-library
.PHONY: install-library uninstall-library
# install(1) replaces the file: servers that have the old one loaded keep it until they restart.
install-library: all
	$(MKDIR_P) '$(DESTDIR)$(pkglibdir)'
	$(INSTALL) -m 755 $(library) '$(DESTDIR)$(pkglibdir)/braid.so'

uninstall: uninstall-library
uninstall-library:
	$(sudo) rm -f '$(DESTDIR)$(pkglibdir)/braid.so'

clean: clean-braid
.PHONY: clean-braid
clean-braid:
	rm -rf $(target) tmp_check

setup:
	scripts/setup

# Set-up may be what brings the default pg_config, so the rest is read by a make of its own.
test: setup
	$(MAKE) --no-print-directory test-installed

test-installed: install
	GATE=1 scripts/test $(or $(SUITES),unit inside regress tap demo)

# Everything there is, on every major. Where it fails, it goes on; each part is named at the end.
.PHONY: test-all
test-all: setup
	scripts/test-all

unit:
	scripts/test unit

# Logic that needs a server, called from Rust: scripts/check-inside PATTERN for some of it.
.PHONY: inside inside-library
inside: install
	scripts/test inside

# As scripts/check-inside builds it.
inside-library:
	CARGO_TARGET_DIR=$(target) PGRX_PG_CONFIG_PATH=$(PG_CONFIG) \
	    $(CARGO) build --release --quiet $(cargo_flags) -p braid-inside --no-default-features --features pg$(major)

regress: install
	scripts/test regress

# make tap TESTS=t/003_kill.pl
tap: install
	scripts/test tap

# Random schemas and statements, replicated by native and by Braid: DIFFERENTIAL_SECONDS (default
# 120) of new seeds.
.PHONY: differential differential-check differential-mends
differential: install
	differential/run --seconds $(or $(DIFFERENTIAL_SECONDS),120)

# Whether that finds faults: each patch in differential/mends puts one in, and it has MEND_SECONDS
# (default 120) to be found.
differential-mends: install
	scripts/check-mends $(MENDS)

# What needs no server of it.
differential-check:
	PYTHONPATH=differential PYTHONDONTWRITEBYTECODE=1 python3 -m unittest -q differential/tests/test_pure.py

# PostgreSQL's own regression and isolation tests on a server with the library, in a database that
# is a node.
.PHONY: postgres
postgres: install
	scripts/test postgres

# All of PostgreSQL's regression tests at one node of a group: the other one gets its schema.
.PHONY: group-regression
group-regression: install
	GROUP_REGRESSION=all TAP_FILE_TIMEOUT=3000 TESTS=t/205_group_regression.pl scripts/test tap

demo: setup
	$(MAKE) --no-print-directory demo-installed

# Builds and installs by itself, quietly.
demo-installed:
	@scripts/demo

bench: setup
	$(MAKE) --no-print-directory bench-installed

bench-installed: install
	@bench/run

# What the dependency tracker costs the leader: keys a second, with 1 to 100,000 transactions
# waiting.
.PHONY: bench-tracker
bench-tracker:
	CARGO_TARGET_DIR=$(target_base)/unit $(CARGO) bench $(cargo_flags) -p braid-bgworker --bench tracker
# The balancer of routing, simulated as in ESDB's evaluation: docs/routing-balancer.md. About two
# minutes.
.PHONY: bench-routing
bench-routing:
	CARGO_TARGET_DIR=$(target_base)/unit $(CARGO) bench $(cargo_flags) -p braid-routing --bench balancer

# Versioned transactions beside plain ones, and grants a second; TPC-W on BENCH_NODES nodes with
# BENCH_CLIENTS clients; and what its interactions cost, for the simulation. Each prints its
# figures. A server with assertions is slower: take another one.
.PHONY: bench-versions bench-tpcw bench-tpcw-costs bench-tpcw-simulated
bench-versions: TESTS = bench/versions.pl
bench-tpcw: TESTS = t/300_tpcw.pl
bench-tpcw-costs: TESTS = bench/tpcw/costs.pl
bench-tpcw: export BENCH_SECONDS ?= 20
bench-tpcw: export BENCH_CLIENTS ?= 1,5,10,20,40,80
bench-tpcw: export BENCH_MODES ?= versioned,single,no release
bench-tpcw: export BENCH_ITEMS ?= 10000
bench-tpcw: export BENCH_CUSTOMERS ?= 28800
bench-versions bench-tpcw bench-tpcw-costs: install
	@output=$$(mktemp) && chmod 666 $$output && \
	    { TAP_FILE_TIMEOUT=7200 BENCH_OUTPUT=$$output TESTS=$(TESTS) scripts/test tap || true; } && cat $$output && rm -f $$output

# TPC-W on 1 to 64 simulated nodes, from costs that were measured; no server. Writes its charts.
bench-tpcw-simulated:
	CARGO_TARGET_DIR=$(target_base)/unit $(CARGO) run --release --quiet $(cargo_flags) -p braid-tpcw

# Where the CPU seconds of a drain go: make bench-profile BENCH_ONLY=sysbench
.PHONY: bench-profile bench-report bench-check
bench-profile: setup
	$(MAKE) --no-print-directory bench-profile-installed

bench-profile-installed: install
	@bench/run profile

# What the output plugin sends of each workload, as traces for the simulator: bench/results/traces.
.PHONY: bench-traces bench-traces-installed
bench-traces: setup
	$(MAKE) --no-print-directory bench-traces-installed

bench-traces-installed: install
	CARGO_TARGET_DIR=$(target_base)/unit $(CARGO) build --release --quiet $(cargo_flags) -p braid-simulator
	@BRAID_SIMULATOR=$(target_base)/unit/release/braid-simulator bench/run traces

# Two nodes that were cut off meet again, with Braid and with Bucardo, which set-up installs for
# this alone: bench/run --help
.PHONY: bench-reconcile bench-reconcile-installed
bench-reconcile:
	SETUP_BUCARDO=1 scripts/setup
	$(MAKE) --no-print-directory bench-reconcile-installed

bench-reconcile-installed: install
	@bench/run reconcile

# A subscription to many tables, with native replication and with Braid: bench/run --help
.PHONY: bench-many bench-many-installed
bench-many: setup
	$(MAKE) --no-print-directory bench-many-installed

bench-many-installed: install
	@bench/run many

# Entries that a group agrees on in a second, and a join beside a subscription's copy: bench/run
# --help
.PHONY: bench-group bench-group-installed
bench-group: setup
	$(MAKE) --no-print-directory bench-group-installed

bench-group-installed: install
	@bench/run group

# Charts and docs/PERFORMANCE.md from the newest results; bench/report FILE... for others.
bench-report:
	@bench/report

# What the bench computes; no server.
bench-check:
	PYTHONPATH=bench PYTHONDONTWRITEBYTECODE=1 python3 -m unittest -q bench/tests/test_pure.py

# What output plugins and formats cost, in decoding alone.
.PHONY: bench-decode bench-decode-installed
bench-decode: setup
	$(MAKE) --no-print-directory bench-decode-installed

bench-decode-installed: install
	@bench/decode

# The wake-ups between leader and appliers under every interleaving that the memory model allows; a
# minute, two from cold.
.PHONY: loom
loom:
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=$(target_base)/loom $(CARGO) test $(cargo_flags) -p braid-ring --release --test loom

# Everything that parses what comes from elsewhere, fed with arbitrary bytes: FUZZ_SECONDS (default
# 60) each target, and a fifth of that with large inputs.
.PHONY: fuzz
fuzz:
	scripts/fuzz

# The tests that find rare faults, for longer: SOAK_MINUTES (default 10) each.
soak: setup
	$(MAKE) --no-print-directory soak-installed

soak-installed: install
	scripts/soak

# Scenario tests with every server under valgrind: make valgrind TESTS=t/008_types.pl
.PHONY: valgrind
valgrind:
	scripts/valgrind $(TESTS)

# The install script is kept by hand: does it declare what the library exports?
.PHONY: check-sql
check-sql: $(library)
	scripts/check-sql $(library)

# In the profile of the library, as the two share what runs at build time (bindgen, macros).
lint: check-sql
	$(CARGO) fmt --all --check
	CARGO_TARGET_DIR=$(target) PGRX_PG_CONFIG_PATH=$(PG_CONFIG) \
	    $(CARGO) clippy --release $(cargo_flags) --workspace --all-targets --no-default-features --features braid/pg$(major),braid-inside/pg$(major) -- -D warnings
	CARGO_TARGET_DIR=$(target) PGRX_PG_CONFIG_PATH=$(PG_CONFIG) RUSTDOCFLAGS="-D warnings" \
	    $(CARGO) doc --release $(cargo_flags) --workspace --no-deps --document-private-items --no-default-features --features braid/pg$(major),braid-inside/pg$(major)
	@$(MAKE) --no-print-directory check-errors
	@$(MAKE) --no-print-directory check-prose
	@if grep -rl '#\[test\]' $(patsubst %,crates/%/src,postgres node plugin apply workers) extension/src; then \
	    echo "lint: these need a server to be linked, so their tests run nowhere: what can be tested without one belongs elsewhere" >&2; exit 1; fi
	@for test in t/*.pl; do grep -qE "^\| \`$${test#t/}\` \|.*\| (both|15|18|-) \| (light|heavy|alone) \| [^|]+ \|$$" t/README.md || { \
	    echo "lint: t/README.md lacks $$test, or does not say where and how it runs" >&2; exit 1; }; done
	@for test in $$(sed -n 's/^| `\([a-z0-9_]*\.pl\)` .*/\1/p' t/README.md); do \
	    [ -e t/$$test ] || { echo "lint: t/README.md names $$test, which is not there" >&2; exit 1; }; done
	@if $(CARGO) deny --version >/dev/null 2>&1; then $(CARGO) deny --offline --log-level error check licenses bans sources; \
	 else echo "lint: cargo-deny is not installed: licences and sources not checked"; fi

# No decision by the text of an error, and this program against its tests.
.PHONY: check-errors
check-errors:
	PYTHONDONTWRITEBYTECODE=1 python3 -m unittest -q scripts/tests/test_check_errors.py
	scripts/check-errors

# Comments, documents and links against the rules that a program can check, and these programs
# against their tests.
.PHONY: check-prose
check-prose:
	PYTHONDONTWRITEBYTECODE=1 python3 -m unittest -q scripts/tests/test_check_prose.py scripts/tests/test_check_links.py scripts/tests/test_pages.py
	scripts/check-prose
	scripts/check-links

# The documents as a site, in tmp_check/manual. Broken links and other warnings are failures.
.PHONY: manual
manual:
	MANUAL_ENVIRONMENT=$(target_base)/manual scripts/manual

# No suite of Debian's carries PostgreSQL 16: it is type-checked against the bindings that pgrx
# ships.
check-versions:
	DOCS_RS=1 RUSTC_WRAPPER=$(abspath scripts/rustc-shipped-bindings) CARGO_TARGET_DIR=$(target_base)/versions \
	    $(CARGO) check $(cargo_flags) -p braid --no-default-features --features pg16
