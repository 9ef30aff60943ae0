/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Marks for QEMU's instruction counter (lab/plugin/instructions.c): to every
 * processor a no-op of eight bytes, to the plugin the moment to copy its
 * counters. So what is counted is the loop, without the start of Python, the
 * exchange and ssh around it.
 */
#ifndef RDMALAB_COUNT_MARK_H
#define RDMALAB_COUNT_MARK_H

#ifdef __x86_64__
/* nopl 0x6d726b<id>(%rax,%rax,1), an address that nothing computes */
#define COUNT_MARK(id) \
	__asm__ volatile(".byte 0x0f, 0x1f, 0x84, 0x00, " #id ", 'k', 'r', 'm'" ::: "memory")
#else
#define COUNT_MARK(id) do { } while (0)
#endif

static inline void count_mark_begin(void)
{
	COUNT_MARK(1);
}

static inline void count_mark_end(void)
{
	COUNT_MARK(2);
}

/* At the top of iteration n: the timed ones lie between the two marks. */
static inline void count_mark_timed(unsigned long long n, unsigned long long warmup,
				    unsigned long long iterations)
{
	if (n == warmup)
		count_mark_begin();
	else if (n == warmup + iterations)
		count_mark_end();
}

#endif
