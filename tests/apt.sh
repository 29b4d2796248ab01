#!/bin/sh
# apt.sh PACKAGE...: installs the packages that are missing, where this is root on a machine with apt-get.
# Elsewhere it does nothing: what needs a package then says so itself.
set -eu

command -v apt-get >/dev/null && command -v dpkg >/dev/null && [ "$(id -u)" = 0 ] || exit 0

missing=
for package in "$@"; do
    dpkg -s "$package" 2>/dev/null | grep -q '^Status: .* installed$' || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

echo "installing$missing with apt-get ..."
# RUNLEVEL: no package starts its daemon here; the lab starts its own
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
install() {
    # shellcheck disable=SC2086  # package names have no spaces
    apt-get -o DPkg::Lock::Timeout=600 install -y -qq --no-install-recommends $missing
}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# The lists of a fresh machine are empty or old: read them only when the first try fails.
install >"$log" 2>&1 || { apt-get update -qq && install; } >"$log" 2>&1 || {
    cat "$log" >&2
    echo "error: apt-get could not install$missing" >&2
    exit 1
}
