/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * faultpoint: warnings, oopses and hangs on request, and clock pairs.
 *
 * main.c      the debugfs files
 * value.c     what may be written to them
 * raise.c     warn, oops
 * hang.c      hang_irq, hang_preempt, hang_task
 * clock.c     clock
 * selftest.c  selftest
 */
#ifndef _FAULTPOINT_H
#define _FAULTPOINT_H

#include <linux/limits.h>
#include <linux/types.h>

struct seq_file;

/* The longest bounded hang; longer is a typing error, or "forever". */
#define FAULTPOINT_MAX_SECONDS	600
#define FAULTPOINT_FOREVER	UINT_MAX

enum faultpoint_hang {
	FAULTPOINT_HANG_IRQ,	/* interrupts off: a hard lockup */
	FAULTPOINT_HANG_PREEMPT, /* preemption off: a soft lockup */
	FAULTPOINT_HANG_TASK,	/* uninterruptible sleep: a hung task */
};

/*
 * One reading of both clocks. The raw clock was read between the two readings
 * of the TSC, on one CPU, with interrupts off, so that mono_raw_ns belongs to
 * some TSC value in [tsc_before, tsc_after].
 */
struct faultpoint_pair {
	u64 tsc_before;
	u64 tsc_after;
	u64 mono_raw_ns;
	unsigned int cpu;
};

int faultpoint_value_trigger(const char *text);
int faultpoint_value_seconds(const char *text, unsigned int *seconds);

void faultpoint_warn(void);
void faultpoint_oops(void);

void faultpoint_hang(enum faultpoint_hang kind, unsigned int msecs);

bool faultpoint_clock_usable(void);
void faultpoint_clock_read(struct faultpoint_pair *pair);
int faultpoint_clock_show(struct seq_file *m, void *unused);

int faultpoint_selftest_show(struct seq_file *m, void *unused);

#endif /* _FAULTPOINT_H */
