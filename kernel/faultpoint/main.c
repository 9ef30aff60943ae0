// SPDX-License-Identifier: GPL-2.0-only
/*
 * faultpoint: the test harness's own test piece.
 *
 * /sys/kernel/debug/faultpoint/, for root:
 *   clock         read   pairs of TSC and CLOCK_MONOTONIC_RAW
 *   selftest      read   the module's own test, as KTAP
 *   warn          write  "1": a warning
 *   oops          write  "1": a NULL dereference; the write does not return
 *   hang_irq      write  seconds or "forever": a loop with interrupts off
 *   hang_preempt  write  the same, a loop with preemption off
 *   hang_task     write  the same, an uninterruptible sleep
 *
 * A bad value is -EINVAL and does nothing. A file that is open holds the
 * module: debugfs takes a reference on the owner of the file's operations.
 */
#include <linux/debugfs.h>
#include <linux/err.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/time64.h>

#include "faultpoint.h"

/* The longest value and its newline fit well. */
#define FAULTPOINT_VALUE_SIZE 32

static struct dentry *faultpoint_dir;

/* The written text without its closing newline, to be freed; or an ERR_PTR. */
static char *faultpoint_get_value(const char __user *from, size_t count,
				  loff_t pos)
{
	char *text;

	/* A value comes in one write. */
	if (pos || !count || count > FAULTPOINT_VALUE_SIZE)
		return ERR_PTR(-EINVAL);
	text = memdup_user_nul(from, count);
	if (IS_ERR(text))
		return text;
	/* A NUL inside would hide what follows it. */
	if (strlen(text) != count) {
		kfree(text);
		return ERR_PTR(-EINVAL);
	}
	if (text[count - 1] == '\n')
		text[count - 1] = '\0';
	return text;
}

static ssize_t faultpoint_trigger(const char __user *from, size_t count,
				  loff_t *pos, void (*raise)(void))
{
	char *text = faultpoint_get_value(from, count, *pos);
	int err;

	if (IS_ERR(text))
		return PTR_ERR(text);
	err = faultpoint_value_trigger(text);
	/* Before the raise: what does not return frees nothing. */
	kfree(text);
	if (err)
		return err;
	raise();
	*pos += count;
	return count;
}

static ssize_t faultpoint_warn_write(struct file *file, const char __user *from,
				     size_t count, loff_t *pos)
{
	return faultpoint_trigger(from, count, pos, faultpoint_warn);
}

static ssize_t faultpoint_oops_write(struct file *file, const char __user *from,
				     size_t count, loff_t *pos)
{
	return faultpoint_trigger(from, count, pos, faultpoint_oops);
}

static ssize_t faultpoint_timed(const char __user *from, size_t count,
				loff_t *pos, enum faultpoint_hang kind)
{
	char *text = faultpoint_get_value(from, count, *pos);
	unsigned int seconds;
	int err;

	if (IS_ERR(text))
		return PTR_ERR(text);
	err = faultpoint_value_seconds(text, &seconds);
	kfree(text);
	if (err)
		return err;
	faultpoint_hang(kind, seconds == FAULTPOINT_FOREVER ?
			FAULTPOINT_FOREVER : seconds * MSEC_PER_SEC);
	*pos += count;
	return count;
}

static ssize_t faultpoint_hang_irq_write(struct file *file,
					 const char __user *from,
					 size_t count, loff_t *pos)
{
	return faultpoint_timed(from, count, pos, FAULTPOINT_HANG_IRQ);
}

static ssize_t faultpoint_hang_preempt_write(struct file *file,
					     const char __user *from,
					     size_t count, loff_t *pos)
{
	return faultpoint_timed(from, count, pos, FAULTPOINT_HANG_PREEMPT);
}

static ssize_t faultpoint_hang_task_write(struct file *file,
					  const char __user *from,
					  size_t count, loff_t *pos)
{
	return faultpoint_timed(from, count, pos, FAULTPOINT_HANG_TASK);
}

static int faultpoint_clock_open(struct inode *inode, struct file *file)
{
	if (!faultpoint_clock_usable())
		return -EOPNOTSUPP;
	return single_open(file, faultpoint_clock_show, NULL);
}

static int faultpoint_selftest_open(struct inode *inode, struct file *file)
{
	/*
	 * The whole of it in one buffer from the start: where one is too small
	 * seq_file runs the test again with a larger one.
	 */
	return single_open_size(file, faultpoint_selftest_show, NULL, PAGE_SIZE);
}

#define FAULTPOINT_READ_FOPS(_name)				\
static const struct file_operations _name##_fops = {		\
	.owner = THIS_MODULE,					\
	.open = _name##_open,					\
	.read = seq_read,					\
	.llseek = seq_lseek,					\
	.release = single_release,				\
}

#define FAULTPOINT_WRITE_FOPS(_name)				\
static const struct file_operations _name##_fops = {		\
	.owner = THIS_MODULE,					\
	.open = simple_open,					\
	.write = _name##_write,					\
	.llseek = noop_llseek,					\
}

FAULTPOINT_READ_FOPS(faultpoint_clock);
FAULTPOINT_READ_FOPS(faultpoint_selftest);
FAULTPOINT_WRITE_FOPS(faultpoint_hang_irq);
FAULTPOINT_WRITE_FOPS(faultpoint_hang_preempt);
FAULTPOINT_WRITE_FOPS(faultpoint_hang_task);
FAULTPOINT_WRITE_FOPS(faultpoint_oops);
FAULTPOINT_WRITE_FOPS(faultpoint_warn);

static const struct {
	const char *name;
	umode_t mode;
	const struct file_operations *fops;
} faultpoint_files[] = {
	{ "clock", 0400, &faultpoint_clock_fops },
	{ "hang_irq", 0200, &faultpoint_hang_irq_fops },
	{ "hang_preempt", 0200, &faultpoint_hang_preempt_fops },
	{ "hang_task", 0200, &faultpoint_hang_task_fops },
	{ "oops", 0200, &faultpoint_oops_fops },
	{ "selftest", 0400, &faultpoint_selftest_fops },
	{ "warn", 0200, &faultpoint_warn_fops },
};

static int __init faultpoint_init(void)
{
	struct dentry *file;
	size_t i;
	int err;

	/*
	 * Drivers go on without debugfs; this one has nothing else, so that a
	 * kernel without it, or with it locked down, refuses the module.
	 */
	faultpoint_dir = debugfs_create_dir("faultpoint", NULL);
	if (IS_ERR(faultpoint_dir)) {
		err = PTR_ERR(faultpoint_dir);
		goto err_out;
	}
	for (i = 0; i < ARRAY_SIZE(faultpoint_files); i++) {
		file = debugfs_create_file(faultpoint_files[i].name,
					   faultpoint_files[i].mode,
					   faultpoint_dir, NULL,
					   faultpoint_files[i].fops);
		if (IS_ERR(file)) {
			err = PTR_ERR(file);
			goto err_dir;
		}
	}
	return 0;

err_dir:
	debugfs_remove(faultpoint_dir);
err_out:
	pr_err("faultpoint: no files in debugfs: %d\n", err);
	return err;
}

static void __exit faultpoint_exit(void)
{
	debugfs_remove(faultpoint_dir);
}

module_init(faultpoint_init);
module_exit(faultpoint_exit);

MODULE_AUTHOR("The rdmalab authors");
MODULE_DESCRIPTION("Warnings, oopses and hangs on request, and clock pairs");
MODULE_LICENSE("GPL");
