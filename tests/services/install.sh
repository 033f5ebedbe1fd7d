#!/usr/bin/env bash
# Installs the servers that the tests need, from Debian's packages (as root). Does nothing where they are there.
set -euo pipefail

packages=()
need() { # PROGRAM PACKAGE...
  command -v "$1" >/dev/null 2>&1 || packages+=("${@:2}")
}
need etcd etcd-server
need radosgw radosgw ceph-mon ceph-osd
need ceph-osd ceph-osd ceph-mon
need chromium chromium
need chromedriver chromium-driver
need promtool prometheus # not the server: only its tool is used
need nginx nginx # the program alone: tests start it with their own files
need systemd-analyze systemd # not the service manager: only its tool is used
ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || need postgres postgresql

if [ "${#packages[@]}" -eq 0 ]; then
  echo "services: everything is installed"
  exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
  echo "services: run as root, or install these packages yourself: ${packages[*]}" >&2
  exit 1
fi

export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for attempt in 1 2 3; do
  if apt-get update -q >"$log" 2>&1 && apt-get install -y -q --no-install-recommends "${packages[@]}" >>"$log" 2>&1; then
    echo "services: installed ${packages[*]}"
    exit 0
  fi
  echo "services: apt-get failed (attempt $attempt of 3)" >&2
  sleep 5
done
tail -n 40 "$log" >&2
exit 1
