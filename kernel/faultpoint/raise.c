// SPDX-License-Identifier: GPL-2.0-only
/*
 * A warning and an oops, each in a function of its own that is never inlined,
 * so that the report names it.
 */
#include <linux/bug.h>
#include <linux/compiler.h>
#include <linux/pid.h>
#include <linux/sched.h>

#include "faultpoint.h"

/* Process context; returns. Not WARN_ONCE(): every request has its warning. */
noinline void faultpoint_warn(void)
{
	WARN(1, "faultpoint: warning requested by %s[%d]\n",
	     current->comm, task_pid_nr(current));
}

/*
 * Process context; does not return: the writer dies in the write, or the
 * kernel panics under oops=panic. Without a panic debugfs still counts the
 * dead writer as inside the file, and the module cannot be removed any more.
 */
noinline void faultpoint_oops(void)
{
	int *nowhere = NULL;

	/* Without it the compiler sees the NULL and puts a trap in its place. */
	OPTIMIZER_HIDE_VAR(nowhere);
	WRITE_ONCE(*nowhere, 1);
}
