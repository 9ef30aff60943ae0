/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Time inside each stage of the driver: from the entry of the stage's function to its
 * return, in the thread (or the softirq on top of it) that runs it. What the scheduler or
 * an interrupt took in between is in the figure.
 */

static __always_inline void stage_time_enter(struct call *call, u32 slot)
{
	if (call->thread)
		call->thread->started[slot] = call->now;
	else
		lose(PROBE_STAGE_TIME, 1);
}

/* A stage function that returns non-zero found nothing (more) to do. */
static __always_inline void stage_time_leave(struct call *call, u32 slot, u32 idle_slot)
{
	u64 start;

	if (!call->thread)
		return;
	start = call->thread->started[slot];
	/* 0: entered before the probe was attached */
	if (!start)
		return;
	record((int)call->ret ? idle_slot : slot, call->now - start);
	call->thread->started[slot] = 0;
}
