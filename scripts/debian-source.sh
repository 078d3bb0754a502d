# shellcheck shell=bash
# How the scripts here fetch Debian's source packages, through the archive that this machine's apt already uses. Sourced.

# fetch_source PACKAGE DIRECTORY SUITE [SECURITY-SUITE]: downloads the source package into DIRECTORY/src, as its suite has it. What
# apt says goes into $log. Nothing is installed but the index, in DIRECTORY.
fetch_source() {
    local package=$1 work=$2 suite=$3 security=${4:-} mirror keyring='' k apt
    # The archive's address is whatever this machine installs its Debian packages from.
    [ -n "$(find /var/lib/apt/lists -name '*_Packages*' -print -quit)" ] || $sudo apt-get update -qq >>"$log" 2>&1
    mirror=$(apt-get indextargets --format '$(REPO_URI) $(COMPONENT) $(ORIGIN)' 2>/dev/null | awk '$2 == "main" && $3 == "Debian" && $1 !~ /security/ && !seen { print $1; seen = 1 }')
    [ -n "$mirror" ] || { say "no Debian archive in this machine's apt configuration"; return 1; }
    mkdir -p "$work/apt/lists/partial" "$work/apt/archives/partial" "$work/src"
    for k in /usr/share/keyrings/debian-archive-keyring.pgp /usr/share/keyrings/debian-archive-keyring.gpg; do
        [ ! -e "$k" ] || keyring=$k
    done
    echo "deb-src [signed-by=$keyring] $mirror $suite main" >"$work/apt/sources.list"
    if [ -n "$security" ]; then echo "deb-src [signed-by=$keyring] ${mirror%/debian*}/debian-security $security main" >>"$work/apt/sources.list"; fi
    apt=(apt-get -qq -o "Dir::Etc::sourcelist=$work/apt/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$work/apt/lists"
         -o "Dir::Cache=$work/apt" -o "Dir::Cache::archives=$work/apt/archives" -o APT::Sandbox::User=root -o Debug::NoLocking=1)
    if ! "${apt[@]}" update >>"$log" 2>&1; then say "cannot read the package index of $suite; see $log"; return 1; fi
    (cd "$work/src" && "${apt[@]}" source --download-only "$package" >>"$log" 2>&1) || {
        say "cannot fetch the source package $package from $suite; see $log"; return 1; }
}
