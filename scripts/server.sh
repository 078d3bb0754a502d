# shellcheck shell=bash
# How the scripts here run PostgreSQL: which one, as whom, with which settings. Sourced, from
# anywhere.

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# The Makefile's default, when none was named.
if [ -z "${PG_CONFIG:-}" ]; then
    if [ -x /usr/lib/postgresql/15/bin/pg_config ]; then PG_CONFIG=/usr/lib/postgresql/15/bin/pg_config; else PG_CONFIG=pg_config; fi
fi
export PG_CONFIG
bindir=$("$PG_CONFIG" --bindir) || { echo "$0: cannot run '$PG_CONFIG'; try 'make setup'" >&2; exit 1; }
pgxs=$(dirname "$(dirname "$(dirname "$("$PG_CONFIG" --pgxs)")")")    # .../pgxs
major=$("$PG_CONFIG" --version | sed -E 's/^[^0-9]*([0-9]+).*/\1/')

# PostgreSQL refuses to run as root: root hands its servers to an ordinary user.
if [ "$(id -u)" != 0 ]; then
    server_user=$(id -un)
elif id "${BRAID_OS_USER:-postgres}" >/dev/null 2>&1; then
    server_user=${BRAID_OS_USER:-postgres}
else
    server_user=nobody
fi

# A directory of the server user's own, short enough for a socket's path. The tree itself may be
# unreadable to that user.
new_stage() {
    local dir
    dir=$(mktemp -d "/tmp/braid-$1.XXXXXX")
    chown "$server_user" "$dir"
    chmod 700 "$dir"
    echo "$dir"
}

# as_server COMMAND...: run as the server user, in $stage. With RUST_BACKTRACE a server would put
# backtraces into errors.
as_server() {
    if [ "$(id -u)" = 0 ]; then
        (cd "$stage" && exec runuser -u "$server_user" -- env -u RUST_BACKTRACE HOME="$stage" LOGNAME="$server_user" USER="$server_user" "$@")
    else
        (cd "$stage" && exec env -u RUST_BACKTRACE "$@")
    fi
}

knows_setting() {
    as_server "$bindir/postgres" --describe-config | awk -F '\t' -v s="$1" '$1 == s { found = 1 } END { exit !found }'
}

# What a Braid node needs in postgresql.conf; some settings exist in some minor versions only, and a
# server does not start with one that it does not know.
node_settings() {
    cat <<CONF
shared_preload_libraries = 'braid'
wal_level = logical
track_commit_timestamp = on
max_worker_processes = 32
max_replication_slots = 32
max_wal_senders = 32
CONF
    ! knows_setting output_plugin_libraries || echo "output_plugin_libraries = 'pgoutput, test_decoding, braid'"
    ! knows_setting max_active_replication_origins || echo "max_active_replication_origins = 64"
}
