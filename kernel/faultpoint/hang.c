// SPDX-License-Identifier: GPL-2.0-only
/*
 * Hangs, for a stated time or for ever. The time is that of mdelay(), which
 * needs neither interrupts nor a clocksource that somebody keeps from wrapping.
 */
#include <linux/delay.h>
#include <linux/irqflags.h>
#include <linux/jiffies.h>
#include <linux/preempt.h>
#include <linux/sched.h>

#include "faultpoint.h"

static void faultpoint_spin(unsigned int msecs)
{
	while (msecs == FAULTPOINT_FOREVER || msecs--)
		mdelay(1);
}

static void faultpoint_sleep(unsigned int msecs)
{
	unsigned long left = msecs_to_jiffies(msecs);

	/*
	 * TASK_UNINTERRUPTIBLE and not TASK_IDLE or killable: only this is
	 * what the hung task detector looks for.
	 */
	if (msecs == FAULTPOINT_FOREVER)
		left = MAX_SCHEDULE_TIMEOUT;
	do {
		left = schedule_timeout_uninterruptible(left);
	} while (left);
}

/*
 * Process context, nothing held. @msecs is milliseconds, or
 * FAULTPOINT_FOREVER: then it does not return.
 */
noinline void faultpoint_hang(enum faultpoint_hang kind, unsigned int msecs)
{
	unsigned long flags;

	switch (kind) {
	case FAULTPOINT_HANG_IRQ:
		local_irq_save(flags);
		faultpoint_spin(msecs);
		local_irq_restore(flags);
		break;
	case FAULTPOINT_HANG_PREEMPT:
		preempt_disable();
		faultpoint_spin(msecs);
		preempt_enable();
		break;
	case FAULTPOINT_HANG_TASK:
		faultpoint_sleep(msecs);
		break;
	}
}
