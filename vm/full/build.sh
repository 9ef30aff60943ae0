#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes the disk of a full node's image; run as root inside the sysroot, in a mount
# namespace of its own. The sysroot stays as it is: changes go to an overlay.
#
#   build.sh DATA WORK RELEASE SIZE_MIB "ADD…" "REMOVE…"
#
# DATA holds this directory's files, WORK is empty and on a disk. Leaves WORK/disk (the
# file system at 1 MiB, no boot record), WORK/core.img and WORK/boot.img. Lines on stdout
# that start with "step " name what follows.
set -eu
data=$1 work=$2 release=$3 size=$4 add=$5 remove=$6
FS_UUID=$(cat /proc/sys/kernel/random/uuid)
PART_UUID=6c6d6472-01 # the boot record's disk signature, and the partition's number
export FS_UUID PART_UUID DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
image=$work/root
mkdir -p "$image" "$work/upper" "$work/overlay"

echo "step overlay"
# volatile: dpkg's syncs are of no use in a directory that a killed build leaves behind.
if ! mount -t overlay overlay "$image" \
	-o "volatile,lowerdir=/,upperdir=$work/upper,workdir=$work/overlay" 2>/dev/null; then
	echo "step copy" # the cache itself lies on an overlay, which cannot be stacked upon
	cp -a --reflink=auto --one-file-system /. "$image/"
fi
mount -t proc proc "$image/proc"
mount -t tmpfs tmpfs "$image/run"
mount --rbind /dev "$image/dev"
in_image() { chroot "$image" "$@"; }

echo "step files"
rm -rf "$image"/etc/ssh/ssh_host_* "$image/etc/hosts" "$image/etc/hostname" \
	"$image"/boot/initrd.img* "$image"/initrd.img* "$image"/vmlinuz* "$image"/.rdmalab*
cp -R "$data/root/." "$image/"
# A package that is installed here must not start its service.
printf '#!/bin/sh\nexit 101\n' > "$image/usr/sbin/policy-rc.d"
chmod 755 "$image/usr/sbin/policy-rc.d"

echo "step packages"
# The kernels of the other tiers, and their headers.
others=$(in_image dpkg-query -W -f '${db:Status-Status} ${Package}\n' |
	sed -n 's/^installed \(linux-\(image\|headers\|binary\|modules\|kbuild\|base\|source\)-[0-9].*\)$/\1/p' |
	grep -v -e "-$release\$" -e "-${release%-*}\(-common\)\?\$" || true)
gone=
for package in $remove $others; do
	in_image dpkg-query -W "$package" >/dev/null 2>&1 && gone="$gone $package-"
done
ls "$image"/var/lib/apt/lists/*_Packages >/dev/null 2>&1 || in_image apt-get -q update
echo "grub-pc grub-pc/install_devices multiselect /dev/vda" | in_image debconf-set-selections
in_image apt-get -q -y --no-install-recommends --autoremove --purge \
	-o Dpkg::Options::=--force-confold -o Dpkg::Use-Pty=0 \
	install "linux-image-$release" $add $gone
in_image apt-get -q clean

echo "step settings"
cp -R "$data/root/." "$image/" # once more: grub-pc rewrites its own from its template
rm -f "$image/usr/sbin/policy-rc.d"
echo "nameserver 10.0.2.3" > "$image/etc/resolv.conf" # QEMU user networking
: > "$image/etc/machine-id" # empty: the credential's, and no "first boot" with presets
rm -f "$image/var/lib/dbus/machine-id" "$image/var/lib/systemd/random-seed"
sed 's/#.*//' "$data/enable" | xargs -r chroot "$image" systemctl -q enable
sed 's/#.*//' "$data/mask" | xargs -r chroot "$image" systemctl -q mask
mkdir -p "$image/etc/systemd/system-generators"
for generator in $(sed 's/#.*//' "$data/mask-generators"); do
	ln -sf /dev/null "$image/etc/systemd/system-generators/$generator"
done
in_image systemctl -q set-default multi-user.target
chmod a-x "$image/etc/grub.d/10_linux"
# It links to an /etc/modules of comments, for which systemd-modules-load would be started.
# What a role puts into /etc/modules-load.d is loaded.
rm -f "$image/etc/modules-load.d/modules.conf"
in_image systemd-hwdb update
in_image ldconfig
in_image journalctl -q --update-catalog
in_image systemd-sysusers
# What these services look at to see whether /etc and /var are older than /usr.
touch "$image/usr" "$image/etc/.updated" "$image/var/.updated"

echo "step boot"
kernel=/boot/vmlinuz-$release
[ -e "$image$kernel" ] || { echo "E: $kernel is not in linux-image-$release"; exit 1; }
in_image update-initramfs -c -k "$release" >/dev/null || in_image update-initramfs -u -k "$release"
mkdir -p "$image/boot/grub/i386-pc"
cp "$image"/usr/lib/grub/i386-pc/*.mod "$image"/usr/lib/grub/i386-pc/*.lst "$image/boot/grub/i386-pc/"
in_image grub-editenv /boot/grub/grubenv create
mount --bind "$data/grub-probe" "$image/usr/sbin/grub-probe"
in_image grub-mkconfig -o /boot/grub/grub.cfg
umount "$image/usr/sbin/grub-probe"
in_image grub-mkimage -O i386-pc -p '(hd0,msdos1)/boot/grub' -o /boot/grub/i386-pc/core.img \
	$(sed "s/#.*//" "$data/grub-modules")
cp "$image/boot/grub/i386-pc/core.img" "$image/usr/lib/grub/i386-pc/boot.img" "$work/"
cp "$work/boot.img" "$image/boot/grub/i386-pc/"

echo "step file system"
umount -R "$image/dev" "$image/run" "$image/proc"
rm -rf "$image"/tmp/* "$image"/var/tmp/* "$image"/run/* "$image"/var/log/apt/* "$image"/var/log/dpkg.log
truncate -s "${size}M" "$work/disk"
# No checksums and no 64-bit block numbers: the guest's CPU is emulated. The tables are
# whole now, so that the guest's kernel has none to write in the background.
mke2fs -q -F -t ext4 -b 4096 -U "$FS_UUID" -L rdmalab -m 0 -J size=32 \
	-O '^metadata_csum,^64bit,^metadata_csum_seed,^orphan_file' \
	-E "offset=1048576,lazy_itable_init=0,lazy_journal_init=1,assume_storage_prezeroed=1" \
	-d "$image" "$work/disk" "$(( (size - 1) * 256 ))"
umount "$image" 2>/dev/null || true
