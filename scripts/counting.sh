# What .ci/run and scripts/test-all share: counting by the last line of what a part prints, and the
# profiles of builds that only tests load.

passed=0 failed=0
failures=()   # repeated at the end, which is what is read of a long output
flaky=()

count() {   # count NAME STATUS OUTPUT: many things, counted by the last line of the file OUTPUT
    local last
    # make's own complaint follows the count when something failed.
    last=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$3" | tail -n 1)
    if [[ $last =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed$ ]]; then
        passed=$((passed + BASH_REMATCH[1])) failed=$((failed + BASH_REMATCH[2]))
        if [ "$2" != 0 ] && [ "${BASH_REMATCH[2]}" = 0 ]; then failed=$((failed + 1)); failures+=("$1: exit status $2"); fi
    else
        failed=$((failed + 1))
        failures+=("$1: no count")
    fi
    mapfile -t -O "${#failures[@]}" failures < <(sed -n "s/^failed: /$1: /p" "$3")
    mapfile -t -O "${#flaky[@]}" flaky < <(sed -n "s/^flaky: /$1: /p" "$3")
}

# Builds that only tests load: optimisation across crates takes four minutes of the gate.
# `make test-all` tests the one that users install.
nearly() { CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_DEBUG=0 "$@"; }
quickly() { CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_OPT_LEVEL=1 CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_DEBUG=0 "$@"; }
