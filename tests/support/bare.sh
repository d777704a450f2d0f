# Runs a program as nobody, without the kernel log and with /sys read-only, in a mount namespace of its own: the machine
# outside does not change. For root:
#
#     unshare -m sh bare.sh WORK PROGRAM [ARGUMENT ...]
#
# WORK becomes nobody's, is seen as /media/work, and is where the program starts. In the environment, one a line: CLOSED,
# folders that nobody may not enter (/root), which are seen empty; PATHS, what below them is to stay visible (an
# interpreter, a checkout).
set -e
work=$1
shift
chown -R 65534:65534 "$work"
mount -t tmpfs -o mode=755 bare /media
mkdir /media/work
mount --bind "$work" /media/work
(umask 077 && : >/media/kmsg)
mount --bind /media/kmsg /dev/kmsg
mount -o remount,bind,ro /sys
n=0
for path in $PATHS; do
    n=$((n + 1))
    mkdir "/media/$n"
    mount --bind "$path" "/media/$n"
done
for folder in $CLOSED; do
    mount -t tmpfs -o mode=755 bare "$folder"
done
n=0
for path in $PATHS; do
    n=$((n + 1))
    mkdir -p "$path"
    mount --bind "/media/$n" "$path"
done
cd /media/work
exec setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=-all --bounding-set=-all "$@"
