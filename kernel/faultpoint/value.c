// SPDX-License-Identifier: GPL-2.0-only
/*
 * What may be written to the files. Only the exact words are taken: a typing
 * error must not bring a machine down.
 */
#include <linux/errno.h>
#include <linux/kstrtox.h>
#include <linux/string.h>

#include "faultpoint.h"

/* warn and oops: "1" and nothing else. */
int faultpoint_value_trigger(const char *text)
{
	return strcmp(text, "1") ? -EINVAL : 0;
}

/* hang_*: a decimal number of seconds from 1 to FAULTPOINT_MAX_SECONDS, or "forever". */
int faultpoint_value_seconds(const char *text, unsigned int *seconds)
{
	unsigned int value;

	if (!strcmp(text, "forever")) {
		*seconds = FAULTPOINT_FOREVER;
		return 0;
	}
	/* kstrtouint() would take "+5". */
	if (text[0] < '1' || text[0] > '9')
		return -EINVAL;
	/* Overflow is -ERANGE there; here a bad value is -EINVAL, always. */
	if (kstrtouint(text, 10, &value) || value > FAULTPOINT_MAX_SECONDS)
		return -EINVAL;
	*seconds = value;
	return 0;
}
