# shellcheck shell=bash
# How the scripts here fetch Debian's packages, through the archive that this machine's apt already
# uses. Sourced.

# open_archive DIRECTORY TYPE SUITE...: sets the array apt to an apt-get that knows these suites
# alone, of binary packages (deb) or sources (deb-src), as they are now. Nothing is installed but
# the index, in DIRECTORY. What apt says goes into $log.
open_archive() {
    local work=$1 type=$2 mirror keyring='' k suite
    # The archive's address is whatever this machine installs its Debian packages from.
    [ -n "$(find /var/lib/apt/lists -name '*_Packages*' -print -quit)" ] || $sudo apt-get update -qq >>"$log" 2>&1
    mirror=$(apt-get indextargets --format '$(REPO_URI) $(COMPONENT) $(ORIGIN)' 2>/dev/null | awk '$2 == "main" && $3 == "Debian" && $1 !~ /security/ && !seen { print $1; seen = 1 }')
    [ -n "$mirror" ] || { say "no Debian archive in this machine's apt configuration"; return 1; }
    mkdir -p "$work/apt/lists/partial" "$work/apt/archives/partial"
    for k in /usr/share/keyrings/debian-archive-keyring.pgp /usr/share/keyrings/debian-archive-keyring.gpg; do
        [ ! -e "$k" ] || keyring=$k
    done
    : >"$work/apt/sources.list"
    : >"$work/apt/status"
    for suite in "${@:3}"; do
        case $suite in
            *-security) echo "$type [signed-by=$keyring] ${mirror%/debian*}/debian-security $suite main" ;;
            *) echo "$type [signed-by=$keyring] $mirror $suite main" ;;
        esac >>"$work/apt/sources.list"
    done
    apt=(apt-get -qq -o "Dir::Etc::sourcelist=$work/apt/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$work/apt/lists"
         -o "Dir::State::status=$work/apt/status" -o "Dir::Cache=$work/apt" -o "Dir::Cache::archives=$work/apt/archives"
         -o APT::Sandbox::User=root -o Debug::NoLocking=1)
    if ! "${apt[@]}" update >>"$log" 2>&1; then say "cannot read the package index of ${*:3}; see $log"; return 1; fi
}

# fetch_source PACKAGE DIRECTORY SUITE [SECURITY-SUITE]: downloads the source package into
# DIRECTORY/src, as its suite has it.
fetch_source() {
    local package=$1 work=$2
    open_archive "$work" deb-src "${@:3}" || return 1
    mkdir -p "$work/src"
    (cd "$work/src" && "${apt[@]}" source --download-only "$package" >>"$log" 2>&1) || {
        say "cannot fetch the source package $package from $3; see $log"; return 1; }
}
