/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Scheduling delay of the driver's work queue: from a task's work being queued
 * (workqueue_queue_work) to a worker starting to run it (workqueue_execute_start).
 */

BPF_HASH(work_queued, u64, u64, 8192);

/* work_func_t func in struct work_struct, behind its data word and its list head */
#define WORK_FUNC 24

int work_delay_queue(struct bpf_raw_tracepoint_args *ctx)
{
	u64 work = ctx->args[2];
	u64 now;

	/* every work of the system passes here: leave at once unless it is the driver's */
	if (read64(work + WORK_FUNC) != WORK_FUNCTION)
		return 0;
	now = bpf_ktime_get_ns();
	if (work_queued.update(&work, &now))
		lose(PROBE_WORK_DELAY, 1);
	return 0;
}

int work_delay_start(struct bpf_raw_tracepoint_args *ctx)
{
	u64 work = ctx->args[0];
	u64 *queued = work_queued.lookup(&work);
	u64 now, function;

	if (!queued)
		return 0;
	now = bpf_ktime_get_ns();
	function = read64(work + RXE_TASK_FUNC);
	record(work_delay_slot(function), now - *queued);
	work_queued.delete(&work);
	return 0;
}
