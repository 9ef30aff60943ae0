// SPDX-License-Identifier: GPL-2.0-only
/*
 * Pairs of TSC and CLOCK_MONOTONIC_RAW, with the bounds of each pair. User
 * space has no such pair: between its two clock readings it can be preempted
 * for any time, and it cannot tell.
 */
#include <linux/irqflags.h>
#include <linux/math64.h>
#include <linux/seq_file.h>
#include <linux/smp.h>
#include <linux/timekeeping.h>
#include <asm/cpufeature.h>
#include <asm/tsc.h>

#include "faultpoint.h"

/* Several a read: the reader takes the narrowest, and sees the spread. */
#define FAULTPOINT_PAIRS 8

bool faultpoint_clock_usable(void)
{
	return boot_cpu_has(X86_FEATURE_TSC);
}

/* Any context. */
void faultpoint_clock_read(struct faultpoint_pair *pair)
{
	unsigned long flags;

	local_irq_save(flags);
	pair->cpu = smp_processor_id();
	pair->tsc_before = rdtsc_ordered();
	pair->mono_raw_ns = ktime_get_raw_ns();
	pair->tsc_after = rdtsc_ordered();
	local_irq_restore(flags);
}

/*
 * Lines of words: "tsc_khz N" (the kernel's calibration; 0 where it has none),
 * "columns ..." and one "pair ..." each. uncertainty_ns is the width of the
 * pair's bounds, rounded up, or "unknown" without a calibration.
 */
int faultpoint_clock_show(struct seq_file *m, void *unused)
{
	struct faultpoint_pair pair;
	unsigned int i;
	u64 width;

	seq_printf(m, "tsc_khz %u\n", tsc_khz);
	seq_puts(m, "columns tsc_before tsc_after mono_raw_ns uncertainty_ns cpu\n");
	for (i = 0; i < FAULTPOINT_PAIRS; i++) {
		faultpoint_clock_read(&pair);
		seq_printf(m, "pair %llu %llu %llu ", pair.tsc_before,
			   pair.tsc_after, pair.mono_raw_ns);
		width = pair.tsc_after - pair.tsc_before;
		if (tsc_khz)
			seq_printf(m, "%llu",
				   DIV64_U64_ROUND_UP(width * 1000000, tsc_khz));
		else
			seq_puts(m, "unknown");
		seq_printf(m, " %u\n", pair.cpu);
	}
	return 0;
}
