/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Time inside each stage of the driver: from the entry of the stage's function to its
 * return, in the thread (or the softirq on top of it) that runs it. What the scheduler or
 * an interrupt took in between is in the figure.
 */

BPF_HASH(stage_started, u64, u64, 8192);

static __always_inline void stage_time_enter(struct call *call, u32 slot)
{
	u64 key = call->thread | (u64)slot << 40;

	if (stage_started.update(&key, &call->now))
		lose(PROBE_STAGE_TIME, 1);
}

/* A stage function that returns non-zero found nothing (more) to do. */
static __always_inline void stage_time_leave(struct call *call, u32 slot, u32 idle_slot)
{
	u64 key = call->thread | (u64)slot << 40;
	u64 *start = stage_started.lookup(&key);

	/* entered before the probe was attached */
	if (!start)
		return;
	record((int)call->ret ? idle_slot : slot, call->now - *start);
	stage_started.delete(&key);
}
