// SPDX-License-Identifier: GPL-2.0-only
/*
 * The module's own test, run by reading the file "selftest": KTAP version 1.
 * It raises nothing and taints nothing; the longest hang in it is 20 ms.
 */
#include <linux/delay.h>
#include <linux/errno.h>
#include <linux/irqflags.h>
#include <linux/kernel.h>
#include <linux/preempt.h>
#include <linux/seq_file.h>
#include <linux/timekeeping.h>

#include "faultpoint.h"

#define FAULTPOINT_TEST_MSECS 20

/* Each test returns true when it holds, else false after a line that tells why. */
struct faultpoint_test {
	const char *name;
	bool (*run)(struct seq_file *m);
};

static bool faultpoint_test_trigger(struct seq_file *m)
{
	static const char * const refused[] = {
		"", "0", "2", "11", "1 ", "+1", "0x1", "y", "-1", "1\n1",
	};
	size_t i;

	if (faultpoint_value_trigger("1")) {
		seq_puts(m, "# \"1\" was refused\n");
		return false;
	}
	for (i = 0; i < ARRAY_SIZE(refused); i++) {
		if (faultpoint_value_trigger(refused[i]) != -EINVAL) {
			seq_printf(m, "# \"%s\" was taken\n", refused[i]);
			return false;
		}
	}
	return true;
}

static bool faultpoint_test_seconds(struct seq_file *m)
{
	static const struct {
		const char *text;
		unsigned int seconds;
	} taken[] = {
		{ "1", 1 }, { "10", 10 }, { "600", FAULTPOINT_MAX_SECONDS },
		{ "forever", FAULTPOINT_FOREVER },
	};
	static const char * const refused[] = {
		"", "0", "-1", "+5", "601", "0x10", "1.5", "10s", "Forever",
		"4294967295", "18446744073709551617",
	};
	unsigned int seconds;
	size_t i;

	for (i = 0; i < ARRAY_SIZE(taken); i++) {
		if (faultpoint_value_seconds(taken[i].text, &seconds) ||
		    seconds != taken[i].seconds) {
			seq_printf(m, "# \"%s\" was refused or misread\n",
				   taken[i].text);
			return false;
		}
	}
	for (i = 0; i < ARRAY_SIZE(refused); i++) {
		if (faultpoint_value_seconds(refused[i], &seconds) != -EINVAL) {
			seq_printf(m, "# \"%s\" was taken\n", refused[i]);
			return false;
		}
	}
	return true;
}

static bool faultpoint_test_clock(struct seq_file *m)
{
	struct faultpoint_pair first, last;
	unsigned int i;

	if (!faultpoint_clock_usable()) {
		seq_puts(m, "# this CPU has no TSC\n");
		return false;
	}
	faultpoint_clock_read(&first);
	for (i = 0; i < 100; i++) {
		faultpoint_clock_read(&last);
		if (last.tsc_after < last.tsc_before) {
			seq_printf(m, "# TSC went back inside a pair: %llu, %llu\n",
				   last.tsc_before, last.tsc_after);
			return false;
		}
	}
	if (last.mono_raw_ns < first.mono_raw_ns) {
		seq_printf(m, "# the raw clock went back: %llu, %llu\n",
			   first.mono_raw_ns, last.mono_raw_ns);
		return false;
	}
	/* One that stands still pairs nothing. */
	msleep(FAULTPOINT_TEST_MSECS);
	faultpoint_clock_read(&last);
	if (last.mono_raw_ns == first.mono_raw_ns) {
		seq_puts(m, "# the raw clock stands still\n");
		return false;
	}
	return true;
}

/*
 * mdelay() is at least its time only where the delay loop's calibration is
 * good, and a TCG guest's is as good as its host was idle: half will do here.
 */
static bool faultpoint_test_hang(struct seq_file *m, enum faultpoint_hang kind)
{
	int depth = preempt_count();
	u64 start, spent;

	start = ktime_get_raw_ns();
	faultpoint_hang(kind, FAULTPOINT_TEST_MSECS);
	spent = ktime_get_raw_ns() - start;
	if (irqs_disabled() || preempt_count() != depth) {
		seq_puts(m, "# came back with interrupts or preemption off\n");
		return false;
	}
	if (spent < FAULTPOINT_TEST_MSECS * NSEC_PER_MSEC / 2) {
		seq_printf(m, "# asked for %u ms, came back after %llu ns\n",
			   FAULTPOINT_TEST_MSECS, spent);
		return false;
	}
	return true;
}

static bool faultpoint_test_hang_irq(struct seq_file *m)
{
	return faultpoint_test_hang(m, FAULTPOINT_HANG_IRQ);
}

static bool faultpoint_test_hang_preempt(struct seq_file *m)
{
	return faultpoint_test_hang(m, FAULTPOINT_HANG_PREEMPT);
}

static bool faultpoint_test_hang_task(struct seq_file *m)
{
	return faultpoint_test_hang(m, FAULTPOINT_HANG_TASK);
}

static const struct faultpoint_test faultpoint_tests[] = {
	{ "trigger_value", faultpoint_test_trigger },
	{ "seconds_value", faultpoint_test_seconds },
	{ "clock_pairs", faultpoint_test_clock },
	{ "hang_irq_returns", faultpoint_test_hang_irq },
	{ "hang_preempt_returns", faultpoint_test_hang_preempt },
	{ "hang_task_returns", faultpoint_test_hang_task },
};

/* Process context; sleeps. */
int faultpoint_selftest_show(struct seq_file *m, void *unused)
{
	const struct faultpoint_test *test;
	size_t i;

	seq_printf(m, "KTAP version 1\n1..%zu\n", ARRAY_SIZE(faultpoint_tests));
	for (i = 0; i < ARRAY_SIZE(faultpoint_tests); i++) {
		test = &faultpoint_tests[i];
		seq_printf(m, "%s %zu %s\n", test->run(m) ? "ok" : "not ok",
			   i + 1, test->name);
	}
	return 0;
}
