/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Completions that one poll of a completion queue returned, 0 for a poll in vain. A
 * completion queue is polled in user space, without a system call: this sits on the return
 * of the provider library's poll function, for every program on the node.
 */

static __always_inline void completions_per_poll_return(struct pt_regs *ctx, u32 slot)
{
	int completions = PT_REGS_RC(ctx);

	if (completions < 0)
		lose(PROBE_COMPLETIONS_PER_POLL, 1);
	else
		record(slot, completions);
}
