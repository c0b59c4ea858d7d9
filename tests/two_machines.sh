#!/usr/bin/env bash
# Two machines on one: network namespaces with an address each, joined by a virtual cable.
#   unshare -rnmpf --kill-child --mount-proc bash two_machines.sh FIRST SECOND
# runs the command FIRST at 192.168.77.1 and SECOND at 192.168.77.2. The host name is a loopback address on both, as Debian
# and Ubuntu write it into /etc/hosts. All processes and mounts end with this script, which ends with FIRST.
set -euo pipefail
mount -t tmpfs tmpfs /run
mkdir /run/netns /run/ray
printf '127.0.0.1 localhost\n127.0.1.1 %s\n' "$(hostname)" >/run/hosts
mount --bind /run/hosts /etc/hosts
ip netns add second
ip link add cable1 type veth peer name cable2
ip link set cable2 netns second
ip addr add 192.168.77.1/24 dev cable1
ip -n second addr add 192.168.77.2/24 dev cable2
for name in lo cable1; do ip link set $name up; done
for name in lo cable2; do ip -n second link set $name up; done
ip netns exec second bash -c "$2" &
bash -c "$1"
